"""The store in an S3 bucket, through boto3, which reads the usual AWS_* settings (AWS_ENDPOINT_URL among them).

Create-only and swap are `put_object` with If-None-Match and If-Match (docs.aws.amazon.com, "conditional writes"): 412 means
lost, 409 means that another write of the key was under way and the request is to be made again.
"""

from __future__ import annotations

import io
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, cast

import boto3.session  # type: ignore[import-untyped, unused-ignore]
import botocore.config  # type: ignore[import-untyped, unused-ignore]
from boto3.exceptions import Boto3Error  # type: ignore[import-untyped, unused-ignore]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped, unused-ignore]

from storage.errors import NotFoundError, StorageError
from storage.store import ObjectInfo, Store
from storage.uri import Location, check_key

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""How long a server may take to accept, and to go on answering, before botocore asks again (AWS_MAX_ATTEMPTS times, 5 unless set)."""
_CONFLICT_TRIES = 8  # about 6 seconds in all
_BODY_TRIES = 3  # botocore repeats a request, but not one whose body broke off while it was read
_READ_BYTES = 4 << 20
_ABSENT_CODES = ("NoSuchKey", "NoSuchUpload", "404")  # a HEAD has no body and so no code of its own


class S3Store(Store):
    """Objects below a prefix of a bucket. A multipart upload that is killed shows no object."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._bucket, _, prefix = location.root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        with self._asking("make a client"):
            timeouts = botocore.config.Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
            self._client = boto3.session.Session().client("s3", config=timeouts)

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        with self._asking(f"read {key!r}", key):
            return self._get(key)

    def put(self, key: str, data: bytes) -> None:
        with self._asking(f"write {key!r}"):
            self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.compare_and_swap(key, data, None)

    def compare_and_swap(self, key: str, data: bytes, version: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        write_id = uuid.uuid4().hex
        for conflict in range(_CONFLICT_TRIES):
            try:
                with self._asking(f"write {key!r} conditionally"):
                    self._client.put_object(
                        Bucket=self._bucket, Key=self._name(key), Body=data, Metadata={"write-id": write_id}, **condition
                    )
                return True
            except StorageError as error:
                status, code = _answer_to(error)
                if status == 412 or (status == 404 and code in _ABSENT_CODES):
                    return self._stands(key, write_id)
                if status != 409:
                    raise
            time.sleep(0.05 * 2**conflict * random.uniform(0.5, 1.0))
        raise StorageError(f"{self.url} answered 409 to {_CONFLICT_TRIES} conditional writes of {key!r}: too many writers at once")

    def _stands(self, key: str, write_id: str) -> bool:
        """Whether our write is the one that stands: botocore repeats a request whose answer was lost, and the repetition gets 412."""
        try:
            with self._asking(f"look at {key!r}", key):
                found = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except NotFoundError:
            return False
        return bool(found["Metadata"].get("write-id") == write_id)

    def size(self, key: str) -> int | None:
        try:
            with self._asking(f"look at {key!r}", key):
                return int(self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"])
        except NotFoundError:
            return None

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        start = self._name(prefix) + "/" if prefix else self._prefix
        with self._asking(f"list {prefix!r}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            found = [
                ObjectInfo(key=item["Key"][len(self._prefix) :], size=item["Size"], modified=item["LastModified"].timestamp())
                for page in pages
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")  # the "folders" that web consoles create
            ]
        return sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        with self._asking(f"delete {key!r}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def upload(self, path: Path, key: str) -> None:
        with self._asking(f"upload {str(path)!r} to {key!r}"):
            self._client.upload_file(str(path), self._bucket, self._name(key))

    def open(self, key: str) -> BinaryIO:
        with self._asking(f"look at {key!r}", key):
            found = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, key, found["ContentLength"], found["ETag"]), _READ_BYTES))

    def sweep(self, older_than: float) -> int:
        """Aborts multipart uploads begun before `older_than`: the parts that a killed process sent are kept, and paid for, until then."""
        swept = 0
        with self._asking("list unfinished uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            unfinished = [upload for page in pages for upload in page.get("Uploads", []) if upload["Initiated"].timestamp() < older_than]
        for upload in unfinished:
            with suppress(NotFoundError), self._asking(f"abort the upload of {upload['Key']!r}", upload["Key"]):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                swept += 1
        return swept

    def read_range(self, key: str, start: int, stop: int, version: str) -> bytes:
        """Bytes [start, stop); StorageError when the object is no longer at `version`."""
        with self._asking(f"read bytes {start} to {stop} of {key!r}", key):
            return self._get(key, {"Range": f"bytes={start}-{stop - 1}", "IfMatch": version})[0]

    def _get(self, key: str, conditions: Mapping[str, str] = MappingProxyType({})) -> tuple[bytes, str]:
        """Bytes and ETag, whole: a connection that ends in the middle is an error after `_BODY_TRIES`."""
        for left in reversed(range(_BODY_TRIES)):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **conditions)
            try:
                return answer["Body"].read(), answer["ETag"]
            except BotoCoreError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _fetch(self, key: str, path: Path) -> None:
        with self._asking(f"download {key!r}", key):
            self._client.download_file(self._bucket, self._name(key), str(path))

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    @contextmanager
    def _asking(self, action: str, key: str | None = None) -> Iterator[None]:
        """Turns the client's errors into ours; an absent object into NotFoundError where `key` is given."""
        try:
            yield
        except ClientError as error:
            if key is not None and error.response.get("Error", {}).get("Code") in _ABSENT_CODES:
                raise NotFoundError(f"no object {key!r} in {self.url}") from error
            raise StorageError(f"could not {action} in {self.url}: {error}") from error
        except (BotoCoreError, Boto3Error) as error:
            raise StorageError(f"could not {action} in {self.url}: {error}. Check the AWS_* settings and the network") from error


def _answer_to(error: StorageError) -> tuple[int | None, str]:
    """HTTP status and code of the answer behind an error of `_asking`; (None, '') when there was no answer."""
    cause = error.__cause__
    if not isinstance(cause, ClientError):
        return None, ""
    return cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode"), cause.response.get("Error", {}).get("Code", "")


class _Ranges(io.RawIOBase):
    """Reads one version of an object by ranges."""

    def __init__(self, store: S3Store, key: str, size: int, version: str) -> None:
        self._store, self._key, self._size, self._version = store, key, size, version
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"cannot seek to {start + offset} in {self._key!r}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        if stop <= self._position:
            return 0
        data = self._store.read_range(self._key, self._position, stop, self._version)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
