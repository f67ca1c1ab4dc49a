"""Manifests of folders: contents, checksums of the files, and of the manifest."""

import dataclasses
import hashlib
import json
from pathlib import Path

from replicax._util.files import reason
from replicax._util.types import JSONObject
from replicax.errors import CheckpointError

__all__ = ["MANIFEST", "FolderFormat", "fingerprint"]

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class FolderFormat:
    """A format of folders with a manifest."""

    title: str  # The kind of folder in errors, such as "checkpoint".
    name: str
    version: int
    advice: str  # In errors about a damaged folder.

    def write_manifest(
        self, folder: Path, contents: JSONObject, files: JSONObject | None = None
    ) -> None:
        """Write a manifest with further `contents`, after all other files.

        `files` are the files' fingerprints; None: they are computed.
        """
        if files is None:
            files = {
                file.relative_to(folder).as_posix(): fingerprint(file)
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
        body = {"format": self.name, "version": self.version, **contents}
        # The checksum is of the parsed JSON, where dict keys are strings.
        body = json.loads(json.dumps({**body, "files": files}))
        text = json.dumps({**body, "sha256": _checksum(body)}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    def read_manifest(
        self, folder: Path, share: tuple[int, int] = (0, 1)
    ) -> JSONObject:
        """Read a folder's manifest, and verify the checksums of the files.

        With `share`, (index, count), only every count-th file is verified. Raises a
        `CheckpointError`, which names the file, if one is damaged or missing, or if the
        format differs.
        """
        try:
            body = json.loads((folder / MANIFEST).read_bytes())
            name, version = body.pop("format"), body.pop("version")
            if (name, version) != (self.name, self.version):
                raise CheckpointError(
                    f"{self.title} {folder}: {MANIFEST} has format {name!r}, version "
                    f"{version!r}; expected {self.name!r}, version {self.version}. "
                    "Read it with the replicax that wrote it."
                )
            checksum = body.pop("sha256")
            whole = {"format": name, "version": version, **body}
            if checksum != _checksum(whole):
                raise self.damaged(folder, MANIFEST, "its checksum is wrong")
            files = sorted(body.pop("files").items())
            for file, expected in files[share[0] :: share[1]]:
                self._check_file(folder, file, expected)
        except OSError as error:
            raise self.damaged(folder, MANIFEST, reason(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"it is no manifest ({error!r})"
            raise self.damaged(folder, MANIFEST, what) from error
        return body

    def damaged(self, folder: Path, file: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.title} {folder}: file {file} is damaged: {what}. {self.advice}"
        )

    def _check_file(self, folder: Path, name: str, expected: JSONObject) -> None:
        try:
            actual = fingerprint(folder / name)
        except OSError as error:
            raise self.damaged(folder, name, reason(error)) from error
        if actual["bytes"] != expected["bytes"]:
            sizes = f"it has {actual['bytes']} bytes, expected {expected['bytes']}"
            raise self.damaged(folder, name, sizes)
        if actual != expected:
            raise self.damaged(folder, name, "its checksum is wrong")


def _checksum(body: JSONObject) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(file: Path) -> JSONObject:
    """Return a file's size and checksum."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}
