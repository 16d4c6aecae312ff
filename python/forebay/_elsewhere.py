"""Arguments that other libraries have where Forebay has others: the error says what is in their
place.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ONE_SAMPLE = "the function is given one sample; loader(batch_size, collate=) is for batches"
_PARTIAL = "functools.partial(function, name=value)"
_NOT_KEPT = "nothing is kept: the function is called when a sample is read"
_NO_NUMBER = "the function is given the sample alone, without its number"

_MAP = {
    "batch_size": _ONE_SAMPLE,
    "batched": _ONE_SAMPLE,
    "drop_last_batch": _ONE_SAMPLE,
    "features": "a sample is whatever the function returns, and has no types of columns",
    "fn_kwargs": _PARTIAL,
    "input_columns": "the function is given the whole sample",
    "keep_in_memory": _NOT_KEPT,
    "load_from_cache_file": _NOT_KEPT,
    "num_proc": "it is called where samples are made: in the threads= of a loader, or in workers of"
    " a DataLoader",
    "remove_columns": "a sample is what the function returns, and has nothing else",
    "with_indices": _NO_NUMBER,
}
_FILTER = {
    "batch_size": _ONE_SAMPLE,
    "batched": _ONE_SAMPLE,
    "fn_kwargs": _PARTIAL,
    "function": "it is the first one, where=",
    "input_columns": "columns=, of which the function is given a dict",
    "keep_in_memory": "the result is kept under name=",
    "load_from_cache_file": "the result is kept under name=; another name= has a new one",
    "num_proc": "threads=",
    "with_indices": f"{_NO_NUMBER}; select() takes numbers of rows, or a mask",
}
_SPLIT = {
    "generator": "seed=",
    "random_state": "seed=",
    "shuffle": "the test part is drawn from all rows, and both parts keep the stored order; take(n)"
    " and skip(n) divide at a row",
    "stratify_by_column": "filter() by each value of the column, split each, and concatenate() the"
    " parts",
    "train_size": "test_size= says what is left",
}

#: By the names of the methods of datasets and mixes.
METHODS: dict[str, Mapping[str, str]] = {
    "cast": {"features": "schema="},
    "filter": _FILTER,
    "map": _MAP,
    "rename": {"column_mapping": "names="},
    "repeat": {"num_epochs": "times=", "num_times": "times="},
    "select": {"indices": "it is the first one, rows_or_columns="},
    "select_columns": {"column_names": "columns="},
    "train_test_split": _SPLIT,
}
CONCATENATE = {
    "axis": "rows come one after the other; columns are not put beside each other",
    "dsets": "datasets=",
}
_OF_NODE = "the node has the credentials; url= or client= says which node"
OPEN = {
    "batch_size": "open(…).loader(batch_size) makes batches",
    "data_dir": "it is the first one, source=",
    "data_files": "it is the first one, source=",
    "endpoint_url": "url=",
    "features": "schema=",
    "filesystem": _OF_NODE,
    "num_proc": "the node looks at many files at the same time",
    "shuffle": "open(…).loader(batch_size, shuffle=) has it",
    "split": "source= names the files of a split; train_test_split() makes one",
    "storage_options": _OF_NODE,
    "streaming": "rows are read when they are asked for, as there; nothing is downloaded before",
    "transform": "decode=, or open(…).map(function)",
}
MIX = {
    "probabilities": "weights=",
    "seed": "loader(batch_size, seed=) has it",
    "stopping_strategy": "epoch_rows= says how long an epoch is; a dataset that ends sooner starts"
    " again, in another order",
}


def _meant(name: str, there: Collection[str]) -> str | None:
    """Which of these arguments may be meant by a name that is none of them."""
    near = [] if name in there else difflib.get_close_matches(name, there, 1)
    return f"did you mean {near[0]}=?" if near else None


def explained(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function: arguments of these names, which it does not have, are refused with what is in
    their place, and those that are misspelled with what may be meant.
    """

    def of(function: Callable[P, T]) -> Callable[P, T]:
        there = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> T:
            for name in given:
                said = elsewhere.get(name) or _meant(name, there)
                if said:
                    raise TypeError(f"{function.__name__}() has no argument {name!r}: {said}")
            return function(*args, **given)

        return called

    return of
