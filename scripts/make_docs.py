"""Draw the pictures of docs/ and write its tables anew from the code.

python scripts/make_docs.py            write what has changed
python scripts/make_docs.py --check    only say what would change; 1 when something would
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out


def outdated() -> dict[Path, str]:
    """File -> what it should hold, of those that hold something else."""
    from docs_pictures import pictures
    from docs_tables import put, tables

    wanted = {DOCS / "pictures" / name: svg for name, svg in pictures().items()}
    found = tables()
    for page in sorted(DOCS.glob("*.md")):
        wanted[page] = put(page.read_text(), found)
    return {
        path: text
        for path, text in wanted.items()
        if not path.is_file() or path.read_text() != text
    }


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = outdated()
    for path, text in changed.items():
        print(f"{path.relative_to(DOCS.parent)} {'is out of date' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
