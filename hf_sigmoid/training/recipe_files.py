"""`hf-sigmoid recipes`: the YAML files to start a run from, of this checkout or of the wheel."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

import hf_sigmoid
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_file


def main(argv: Sequence[str] | None = None) -> None:
    """List the files with their first comments, or copy one.

    Raises:
        BadInput: no such file, or one that the copy would replace.
    """
    parser = argparse.ArgumentParser(
        prog="hf-sigmoid recipes", description="YAML files for hf-sigmoid train and distil, and "
        "for accelerate launch.",
    )  # fmt: skip
    parser.add_argument("--copy", metavar="NAME", help="write this one, to change it")
    parser.add_argument("path", nargs="?", type=Path, help="with --copy: where (default: here)")
    args = parser.parse_args(argv)
    known = files()
    if args.copy is None:
        width = max(map(len, known))
        for name, file in known.items():
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            print(f"{name:{width}}  {first.lstrip('# ')}")
        return
    name = args.copy.removesuffix(".yaml")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise BadInput(f"--copy: no recipe {name!r}; the nearest is {near!r}")
    target = args.path or Path(known[name].name)
    target = target / known[name].name if target.is_dir() else target
    if target.exists():
        raise BadInput(f"--copy: expected a new file, got {target}, which exists")
    write_file(target, lambda place: place.write_bytes(known[name].read_bytes()))
    print(target)


def files() -> dict[str, Path]:
    """The files by their names, as sigmoid/continue."""
    package = Path(hf_sigmoid.__file__).parent
    places = (package / "recipes", package.parent / "recipes")  # a wheel's, a checkout's
    folder = next(place for place in places if place.is_dir())
    return {f"{f.parent.name}/{f.stem}": f for f in sorted(folder.glob("*/*.yaml"))}
