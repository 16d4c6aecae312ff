"""Any S3 client: only the endpoint changes. `X-Cache` says where the bytes came from.

python examples/boto3_client.py
"""

import os
import sys

import boto3

BUCKET = sys.argv[1] if len(sys.argv) > 1 else "my-bucket"


def main():
    s3 = boto3.client(
        "s3",
        endpoint_url=os.environ["FOREBAY_NODE"],
        region_name="us-east-1",
        # A node without keys accepts any; a node with keys requires one of its own.
        aws_access_key_id=os.environ.get("AWS_ACCESS_KEY_ID", "any"),
        aws_secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY", "any"),
    )
    for found in s3.list_objects_v2(Bucket=BUCKET, Prefix="images/")["Contents"]:
        for _ in range(2):
            answer = s3.get_object(Bucket=BUCKET, Key=found["Key"])
            size = len(answer["Body"].read())
            cache = answer["ResponseMetadata"]["HTTPHeaders"]["x-cache"]
            print(f"{found['Key']}: {size} bytes, {cache}")


if __name__ == "__main__":
    main()
