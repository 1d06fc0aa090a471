"""An S3 server on loopback, with one bucket: moto answers."""

import logging
from typing import Self

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


class S3Server:
    """A server as a context manager; tests read and write its objects beside the program."""

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0)
        self._server.start()
        host, port = self._server.get_host_and_port()
        # What points a program at this server.
        names = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        self.environment = {**names, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        self._bucket = boto3.resource(
            "s3", "us-east-1", endpoint_url=f"http://{host}:{port}", **keys
        ).create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return every object below a prefix, by key."""
        return {
            one.key: one.get()["Body"].read() for one in self._bucket.objects.filter(Prefix=prefix)
        }

    def put(self, key: str, data: bytes) -> None:
        self._bucket.put_object(Key=key, Body=data)
