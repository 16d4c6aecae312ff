"""The published aistore client, unchanged: whole objects and members of shards in one request.

python examples/aistore_client.py
"""

import os
import sys

from aistore.sdk import Client

BUCKET = sys.argv[1] if len(sys.argv) > 1 else "my-bucket"


def main():
    client = Client(os.environ["FOREBAY_NODE"])
    bucket = client.bucket(BUCKET)
    batch = client.batch(bucket=bucket)
    batch.add("corpus/en/0.parquet")
    batch.add("images/000.tar", archpath="000000.jpg")
    batch.add("images/001.tar", archpath="000001.jpg")
    for entry, data in batch.get():
        print(entry.obj_name, entry.archpath or "", len(data))


if __name__ == "__main__":
    main()
