"""`python -m collm_replica.prepare SOURCE FOLDER`: make a model ready in FOLDER, and let FOLDER/served name it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from collm_common.errors import CollmError, ModelError
from collm_replica.models import resolve

SERVED = "served"


def prepare(source: str, folder: Path) -> Path:
    """A link to the model's own folder, switched in one step. `source` as in `resolve`, or a folder of one GGUF file.

    Raises ModelError.
    """
    found = resolve(_single_gguf(source), str(folder)).resolve()
    link, fresh = folder / SERVED, folder / f"{SERVED}.{os.getpid()}"
    try:
        fresh.symlink_to(found)
        fresh.replace(link)
    except OSError as error:
        raise ModelError(f"{link}: {error.strerror}") from error
    return link


def _single_gguf(source: str) -> str:
    path = Path(source)
    if not path.is_dir() or (path / "config.json").exists():
        return source
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"{source} holds no config.json and {len(files)} GGUF files; name one")
    return str(files[0])


def main() -> None:
    """Exit status 1 when the model cannot be served."""
    parser = argparse.ArgumentParser(prog="collm_replica.prepare", description=__doc__)
    parser.add_argument("source", help="folder, hub name or GGUF file")
    parser.add_argument("folder", type=Path, help="where converted models are kept")
    arguments = parser.parse_args()
    try:
        link = prepare(arguments.source, arguments.folder)
    except CollmError as error:
        print(f"prepare: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"{link} is {link.readlink()}")


if __name__ == "__main__":
    main()
