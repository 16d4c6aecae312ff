"""The PyTorch datasets, in DataLoaders with and without workers, by fork and by spawn."""

from __future__ import annotations

import copy
import copyreg
import itertools
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler

import dataset
import forebay
import numpy as np
import pandas
import pytest
import torch
from forebay.torch import IterableDataset, MapDataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

NAMES = [f"img/{i:04}.bin" for i in range(200)]


def total(item: forebay.Item) -> tuple[int, int]:
    """A "decoder": the size and the sum of the bytes."""
    return item.size, int(np.frombuffer(item, np.uint8).sum(dtype=np.int64))


def first_byte(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1]


def absent(item: forebay.Item) -> str:
    return f"absent: {item.objname}"


@pytest.fixture(scope="module")
def truth(objects):
    return [(len(objects[n]), sum(objects[n])) for n in NAMES]


def test_map_style_is_one_request_per_batch(client, node, truth):
    data = MapDataset(client, NAMES, bucket="train", decode=total)
    assert len(data) == 200 and data[7] == truth[7] and data[-1] == truth[-1]
    assert data.__getitems__([5, 3, 3, 199]) == [truth[5], truth[3], truth[3], truth[199]]
    assert data.__getitems__([]) == []
    for index in (200, -201):
        with pytest.raises(IndexError):
            data[index]


def test_the_default_sample_is_a_view(client, objects):
    data = MapDataset(client, NAMES + ["empty"], bucket="train")
    sample = data[9]
    assert sample.dtype == torch.uint8 and sample.shape == (len(objects[NAMES[9]]),)
    assert sample.numpy().tobytes() == objects[NAMES[9]]
    assert data[200].shape == (0,)


@pytest.mark.parametrize("workers", [0, 1])
def test_views_in_samples_are_bytes(client, objects, workers):
    def data_of(item: forebay.Item) -> dict:
        return {"data": item.data}

    truth = [objects[name] for name in NAMES[:6]]
    for of in (MapDataset, IterableDataset):
        data = of(client, NAMES[:6], bucket="train", decode=data_of)
        loader = DataLoader(
            data, batch_size=3, num_workers=workers, timeout=120 * workers, collate_fn=list
        )
        assert [sample["data"] for batch in loader for sample in batch] == truth
        assert all(isinstance(sample["data"], bytes) for sample in data)
        loader = DataLoader(data, batch_size=3, num_workers=workers, timeout=120 * workers)
        assert [value for batch in loader for value in batch["data"]] == truth


def test_workers_send_items_as_bytes(client, objects):
    data = MapDataset(client, NAMES[:6], bucket="train", decode=lambda item: item)
    loader = DataLoader(data, batch_size=3, num_workers=1, timeout=120, collate_fn=list)
    found = [sample for batch in loader for sample in batch]
    assert found == [objects[name] for name in NAMES[:6]]


@pytest.mark.parametrize("of", [MapDataset, IterableDataset])
def test_columns_of_a_table_are_taken_in_their_order(client, objects, of):
    """Whatever their index says, which is another one after a filter or a sort."""
    table = pandas.DataFrame({"name": NAMES[:6], "label": range(6)}).sort_values(
        "label", ascending=False
    )
    few = table[table.label < 4]
    for names, labels in (
        (few.name, few.label),
        (few.name, few.label.to_numpy()),
        (few.name.tolist(), few.label),
        (pandas.Series(zip(few.name, few.label, strict=True), index=few.index), None),
    ):
        data = of(client, names, bucket="train", labels=labels, decode=bytes)
        assert list(data) == [(objects[NAMES[i]], i) for i in (3, 2, 1, 0)]


def test_what_has_no_order_is_refused(client):
    for names in ({NAMES[0]}, {NAMES[0]: 1}, iter(NAMES), NAMES[0], None):
        with pytest.raises(TypeError):
            MapDataset(client, names, bucket="train")
    for labels in ({1}, iter([1]), {NAMES[0]: 1}, "1"):
        with pytest.raises(TypeError, match="labels must be a sequence"):
            MapDataset(client, NAMES[:1], bucket="train", labels=labels)


class Own(torch.utils.data.IterableDataset):
    """A dataset of a user's own, whose workers yield what a batch has."""

    def __init__(self, client: forebay.Client, names: list[str], what: str) -> None:
        self.client, self.names, self.what = client, names, what

    def __iter__(self):
        answer = self.client.batch(self.names, bucket="train", continue_on_error=True)
        if self.what == "batch":
            yield answer
        for item in answer:
            yield {"views": [item.data]} if self.what == "views" else item


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_dataset_of_ones_own_send_views(client, objects, method):
    own = {"batch_size": None, "collate_fn": dict, "num_workers": 1, "timeout": 240}
    data = DataLoader(Own(client, NAMES[:3], "views"), **own, multiprocessing_context=method)
    assert list(data) == [{"views": [objects[name]]} for name in NAMES[:3]]


def as_it_is(sample):
    return sample


def test_what_workers_cannot_send_fails_the_loop(client, objects):
    own = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 1, "timeout": 240}
    taken = iter(DataLoader(Own(client, [NAMES[0], "none", NAMES[1]], "items"), **own))
    assert next(taken) == objects[NAMES[0]]
    with pytest.raises(forebay.EntryFailed, match="none"):
        list(taken)
    with pytest.raises(forebay.InvalidRequest):
        list(DataLoader(Own(client, NAMES[:1], "batch"), **own))
    # In this process everything is as it was.
    for unsendable in (memoryview(b"1"), client.batch(NAMES[:1], bucket="train")):
        with pytest.raises(TypeError):
            ForkingPickler.dumps(unsendable)


def as_list(view: memoryview):
    return list, (view.tolist(),)


def test_how_others_pickle_views_stays(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, memoryview, as_list)
    assert pickle.loads(ForkingPickler.dumps(memoryview(b"12"))) == [49, 50]


def test_labels_and_transforms(client, objects, truth):
    pairs = MapDataset(
        client, [(n, i) for i, n in enumerate(NAMES)], bucket="train", transform=first_byte
    )
    data, label = pairs[12]
    assert label == 12 and data.tolist() == [objects[NAMES[12]][0]]
    with_labels = MapDataset(
        client, np.array(NAMES), bucket="train", labels=range(200), decode=total
    )
    assert with_labels.__getitems__([3, 1]) == [(truth[3], 3), (truth[1], 1)]
    batches = list(DataLoader(pairs, batch_size=50))
    assert [b[0].shape for b in batches] == [(50, 1)] * 4
    assert torch.cat([b[1] for b in batches]).tolist() == list(range(200))
    with pytest.raises(ValueError):
        MapDataset(client, NAMES, labels=[1])
    with pytest.raises(TypeError):
        MapDataset(client, "train/img")


def test_members_of_shards(client):
    members = sorted(m for m in dataset.MEMBERS if m.endswith(".jpg"))
    data = MapDataset(
        client,
        [{"objname": "shards/a.tar", "archpath": m} for m in members],
        bucket="train",
        decode=bytes,
    )
    assert data.__getitems__(range(20)) == [dataset.MEMBERS[m] for m in members]


def test_entries_that_fail(client, truth):
    names = [NAMES[0], "nope", NAMES[2]]
    with pytest.raises(forebay.Error):
        MapDataset(client, names, bucket="train").__getitems__([0, 1, 2])
    data = MapDataset(client, names, bucket="train", decode=total, on_error=absent)
    assert data.__getitems__([2, 1, 0]) == [truth[2], "absent: nope", truth[0]]


@pytest.mark.parametrize("workers", [None, "fork", "spawn", "forkserver"])
def test_map_style_in_a_dataloader(client, truth, workers):
    client.get("train/one")  # the parent's connections and threads exist before the workers do
    data = MapDataset(client, NAMES, bucket="train", labels=range(200), decode=total)
    how = (
        {}
        if workers is None
        else {"num_workers": 2, "multiprocessing_context": workers, "persistent_workers": True}
    )
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=generator, **how)
    for _ in range(2):
        seen = {}
        for (sizes, sums), labels in loader:
            for size, s, label in zip(sizes.tolist(), sums.tolist(), labels.tolist(), strict=True):
                seen[label] = (size, s)
        assert [seen[i] for i in range(200)] == truth
    assert data[0] == (truth[0], 0)


@pytest.mark.parametrize("workers", [None, "fork", "spawn"])
def test_iterable_in_a_dataloader(client, truth, workers):
    data = IterableDataset(
        client,
        NAMES,
        bucket="train",
        labels=range(200),
        decode=total,
        request_size=13,
        shuffle=True,
        prefetch=2,
    )
    # A copy tells workers that persist its epoch as well.
    data = copy.deepcopy(data)
    how = (
        {}
        if workers is None
        else {"num_workers": 2, "multiprocessing_context": workers, "persistent_workers": True}
    )
    loader = DataLoader(data, batch_size=16, **how)
    orders = []
    for epoch in range(2):
        data.set_epoch(epoch)
        labels = []
        for (sizes, sums), label in loader:
            labels += label.tolist()
            assert list(zip(sizes.tolist(), sums.tolist(), strict=True)) == [
                truth[i] for i in label.tolist()
            ]
        assert sorted(labels) == list(range(200))
        orders.append(labels)
    assert orders[0] != orders[1] and len(data) == 200


@pytest.mark.parametrize("workers", [0, 3])
def test_a_stateful_dataloader_resumes_by_itself_and_reads_nothing_again(client, workers):
    """At each step of an epoch, with another batch size as well."""

    def made(batch_size=16, every=1):
        read = torch.zeros((), dtype=torch.int64).share_memory_()

        def counting(item: forebay.Item) -> int:
            read.add_(1)
            return item.size

        data = IterableDataset(
            client,
            NAMES,
            bucket="train",
            labels=range(200),
            decode=counting,
            shuffle=True,
            seed=7,
            request_size=13,
        )
        how = {"multiprocessing_context": "fork", "prefetch_factor": 1} if workers else {}
        how["snapshot_every_n_steps"] = every
        loader = StatefulDataLoader(data, batch_size=batch_size, num_workers=workers, **how)
        return data, loader, read

    data, loader, _ = made()
    data.set_epoch(3)
    truth = [labels.tolist() for _, labels in loader]
    assert sorted(itertools.chain(*truth)) == list(range(200))
    if not workers:
        # A state of the beginning is no beginning. (Workers begin when they are started.)
        data, loader, _ = made()
        loader.state_dict()
        data.set_epoch(3)
        assert [labels.tolist() for _, labels in loader] == truth
    # Nobody sets the epoch of what resumes: its state says it.
    for step in range(1, len(truth), 4):
        data, loader, _ = made()
        data.set_epoch(3)
        first = [labels.tolist() for _, labels in itertools.islice(loader, step)]
        saved = pickle.loads(pickle.dumps(loader.state_dict()))
        _, again, read = made()
        again.load_state_dict(saved)
        rest = [labels.tolist() for _, labels in again]
        assert first + rest == truth
        assert int(read) == sum(map(len, rest))
    _, other, _ = made(batch_size=5)
    other.load_state_dict(saved)
    rest = [label for _, labels in other for label in labels.tolist()]
    assert sorted(rest + list(itertools.chain(*first))) == list(range(200))
    # What comes after is another epoch, from its beginning.
    assert sum(len(labels) for _, labels in again) == 200
    _, coarse, _ = made(every=4)
    first = [labels.tolist() for _, labels in itertools.islice(coarse, 6)]
    _, again, _ = made(every=4)
    again.load_state_dict(coarse.state_dict())
    rest = list(itertools.chain(*(labels.tolist() for _, labels in again)))
    assert sorted(rest + list(itertools.chain(*first))) == list(range(200))


def test_a_state_of_another_iterable_dataset_is_refused(client):
    def state(names=NAMES, **options):
        data = IterableDataset(client, names, bucket="train", **options)
        iteration = iter(data)
        next(iteration)
        return iteration.state_dict()

    def resumed(saved, names=NAMES, **options):
        iteration = iter(IterableDataset(client, names, bucket="train", **options))
        iteration.load_state_dict(saved)
        return list(iteration)

    assert len(resumed(state(np.array(NAMES)))) == 199, "the same names in another container"
    assert len(resumed(state(request_size=1), request_size=50)) == 199
    for said, saved in (
        ("over 100 entries, and here are 200", state(NAMES[:100])),
        ("over other entries", state([*NAMES[1:], NAMES[0]])),
        ("seed=1, and here is 0", state(seed=1)),
        ("shuffle=True, and here is False", state(shuffle=True)),
        ("of 2 ranks, and here are 1", state(rank=0, world_size=2)),
    ):
        with pytest.raises(forebay.InvalidRequest, match=said):
            resumed(saved)
    for foreign in ({}, None, {"start": {}, "step": 1}):
        with pytest.raises(forebay.InvalidRequest, match="not a state of a forebay"):
            resumed(foreign)

    def loader(workers):
        data = IterableDataset(client, NAMES, bucket="train", decode=total)
        return StatefulDataLoader(
            data, batch_size=8, num_workers=workers, multiprocessing_context="fork"
        )

    two = loader(2)
    next(iter(two))
    saved = two.state_dict()
    three = loader(2)
    workers = saved["_snapshot"]["_worker_snapshots"]
    # As if the workers had been others.
    workers["worker_0"], workers["worker_1"] = workers["worker_1"], workers["worker_0"]
    three.load_state_dict(saved)
    with pytest.raises(forebay.InvalidRequest, match=r"worker 1 of 2, and this is worker 0 of 2"):
        next(iter(three))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_uneven", [False, True])
def test_ranks_share_the_rows(client, world, shuffle, drop_uneven):
    options = {
        "bucket": "train",
        "labels": range(200),
        "decode": total,
        "shuffle": shuffle,
        "drop_uneven": drop_uneven,
        "request_size": 50,
    }
    rows = []
    for rank in range(world):
        data = IterableDataset(client, NAMES, rank=rank, world_size=world, **options)
        mine = [label for _, label in data]
        assert len(mine) == len(data)
        rows += mine
    assert len(rows) == len(set(rows)) == (200 - 200 % world if drop_uneven else 200)
    again = [
        label for _, label in IterableDataset(client, NAMES, rank=0, world_size=world, **options)
    ]
    assert again == rows[: len(again)]


def test_the_rank_comes_from_the_environment_and_stays_in_spawned_workers(client, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    data = IterableDataset(client, NAMES, bucket="train", labels=range(200), decode=total)
    assert [label for _, label in data] == list(range(1, 200, 4)) and len(data) == 50
    pickled = pickle.dumps(data)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert [label for _, label in pickle.loads(pickled)] == list(range(1, 200, 4))


def in_process_group(rank: int, url: str, store: str, out) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data = IterableDataset(
        forebay.Client(url), NAMES, bucket="train", labels=range(200), decode=total
    )
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
    out.put((rank, [label for _, label in loader]))
    dist.destroy_process_group()


def test_the_rank_comes_from_torch_distributed(node, tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [
        context.Process(target=in_process_group, args=(r, node.url, str(tmp_path / "store"), out))
        for r in range(2)
    ]
    for p in ranks:
        p.start()
    got = dict(out.get(timeout=300) for _ in ranks)
    for p in ranks:
        p.join(30)
    assert got == {0: list(range(0, 200, 2)), 1: list(range(1, 200, 2))}


def test_from_prefix(client, truth):
    assert (
        MapDataset.from_prefix(client, "train/img/", decode=total).__getitems__(range(200)) == truth
    )
    assert list(IterableDataset.from_prefix(client, "s3://train/img/", decode=total)) == truth


def broken(item: forebay.Item) -> int:
    raise ValueError(f"not an image: {item.size} bytes")


def test_a_decode_that_fails_names_the_object(client, objects):
    data = MapDataset(client, NAMES, bucket="train", decode=broken)
    with pytest.raises(forebay.SampleFailed) as e:
        data.__getitems__([3])
    size = len(objects[NAMES[3]])
    said = f"train/{NAMES[3]} (row 3): ValueError: not an image: {size} bytes"
    assert said in str(e.value)
    assert isinstance(e.value.__cause__, ValueError)
    assert (e.value.row, e.value.file) == (3, f"train/{NAMES[3]}")
    member = next(m for m in dataset.MEMBERS if m.endswith(".jpg"))
    entry = {"objname": "shards/a.tar", "archpath": member}
    for options in ({"decode": broken}, {"decode": total, "transform": broken_transform}):
        with pytest.raises(forebay.SampleFailed) as e:
            MapDataset(client, [entry], bucket="train", **options)[0]
        assert f"train/shards/a.tar, member {member} (row 0): ValueError" in str(e.value)


def broken_transform(_: object) -> int:
    raise ValueError("too small")


def test_a_prefix_with_nothing_under_it_is_named(client):
    for kind in (MapDataset, IterableDataset):
        with pytest.raises(forebay.NotFound, match="there is nothing under train/no/such") as e:
            kind.from_prefix(client, "train/no/such/")
        assert "client.list" in str(e.value)


def test_what_a_map_dataset_says_of_itself(client):
    plain = MapDataset(client, NAMES, bucket="train")
    assert repr(plain) == f"<forebay.torch.MapDataset: 200 entries of {client!r}>"
    labelled = MapDataset(client, NAMES * 10, bucket="train", labels=range(2000))
    assert "2,000 entries with labels of " in repr(labelled)


def test_a_workers_error_reaches_the_trainer(client):
    data = MapDataset(client, ["nope"], bucket="train")
    with pytest.raises(forebay.Error):
        list(DataLoader(data, num_workers=1, batch_size=1, multiprocessing_context="fork"))


def test_wrong_arguments(client):
    for options in (
        {"rank": 0},
        {"world_size": 2},
        {"rank": 2, "world_size": 2},
        {"request_size": 0},
        {"request_size": 1.5},
        {"request_size": "3"},
        {"prefetch": -1},
        {"prefetch": None},
        {"seed": 1.5},
        {"on_error": "skip"},
    ):
        with pytest.raises(ValueError):
            IterableDataset(client, NAMES, **options)
    for name in ("shuffle", "drop_uneven"):
        for given in ("no", 1, None):
            with pytest.raises(TypeError, match=f"{name} must be True or False"):
                IterableDataset(client, NAMES, **{name: given})
    for epoch in (1.5, "1", -1, None, True, 1 << 63, torch.tensor(1.5)):
        with pytest.raises(forebay.InvalidRequest, match="epochs are counted from 0"):
            IterableDataset(client, NAMES).set_epoch(epoch)
    for index in ("a", 1.5, slice(3), None):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            MapDataset(client, NAMES, bucket="train")[index]
    for make in (MapDataset, MapDataset.from_prefix, IterableDataset.from_prefix):
        with pytest.raises(TypeError, match=r"client must be a forebay\.Client"):
            make("http://127.0.0.1:1", "train")
