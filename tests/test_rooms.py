"""The rooms inside the floors: arrows between folders run one way, and a folder stays small enough to read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("kernels", "engine", "studio", "pages")
MOST_FILES = 17

Arrows = dict[str, set[str]]


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, less the package's own name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headscope."):
            module = str(node.module).removeprefix("headscope.")
            for alias in node.names:
                yield f"{module}.{alias.name}"


def room(module: str, root: Path) -> str:
    """`engine.attend` of `engine.attend.index.build_index`; a floor's own files are a room called as the floor."""
    parts = module.split(".")
    inner = len(parts) > 1 and (root / parts[0] / parts[1]).is_dir()
    return ".".join(parts[:2]) if inner else parts[0]


def arrows(root: Path) -> Arrows:
    """Which room imports which other rooms."""
    found: Arrows = defaultdict(set)
    for floor in FLOORS:
        for path in (root / floor).rglob("*.py"):
            here = room(".".join(path.relative_to(root).with_suffix("").parts), root)
            for module in imported(path):
                there = room(module, root)
                if there != here:
                    found[here].add(there)
    return found


def circles(graph: Arrows) -> list[tuple[str, str]]:
    """Arrows between rooms that can be walked back. A floor's own files are its door, and left out."""
    rooms = {here: {there for there in to if "." in there} for here, to in graph.items() if "." in here}

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = rooms.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    return [(here, there) for here, to in rooms.items() for there in to if here in reachable(there)]


def test_no_circle_between_rooms() -> None:
    assert circles(arrows(ROOT)) == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "engine" / name).mkdir(parents=True)
        (tmp_path / "engine" / name / "one.py").write_text(f"from headscope.engine.{other}.one import x\n")
    for floor in FLOORS:
        (tmp_path / floor).mkdir(exist_ok=True)
    assert sorted(circles(arrows(tmp_path))) == [("engine.a", "engine.b"), ("engine.b", "engine.a")]


def test_rooms_stay_small() -> None:
    """A folder that outgrows this is asked whether it holds one kind of thing."""
    crowded = {
        str(folder.relative_to(ROOT)): count
        for floor in FLOORS[:3]
        for folder in (ROOT / floor).rglob("*")
        if folder.is_dir() and (count := len(list(folder.glob("*.py")))) > MOST_FILES
    }
    assert crowded == {}
