"""WebDataset: a pipeline that only changes its URLs, and the loader that can replace it.

python examples/webdataset_dropin.py
"""

import os
import sys

import forebay
import webdataset as wds

NODE = os.environ["FOREBAY_NODE"]
DATA = sys.argv[1] if len(sys.argv) > 1 else "s3://my-bucket/images/{000..003}.tar"


def unchanged():
    """The unchanged pipeline, over the node's S3 endpoint: the second epoch comes from its disk."""
    urls = f"{NODE}/{DATA.removeprefix('s3://')}"
    pipeline = wds.WebDataset(urls, shardshuffle=False).decode("pil")
    return {sample["__key__"]: sample["cls"] for sample in pipeline}


def replaced():
    """The same samples by number: shuffled over all shards, dealt to ranks, resumed exactly."""
    dataset = forebay.open(DATA)
    loader = dataset.loader(batch_size=16, shuffle=forebay.Block(4), seed=1, uneven="pad")
    return {row["__key__"]: int(bytes(row["cls"])) for batch in loader for row in batch}


def main():
    before, after = unchanged(), replaced()
    print(f"{len(before)} samples by WebDataset, {len(after)} by the loader")
    print("the same samples" if before == after else "they differ")


if __name__ == "__main__":
    main()
