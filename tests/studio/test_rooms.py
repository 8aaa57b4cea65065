"""What draws and what does not: all rooms but ui, lessons and serve know nothing of streamlit."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from headscope.engine.base.places import ROOT

FREE = ("base", "charts", "data", "lab", "store", "work")
FILES = [path for room in FREE for path in sorted((ROOT / "studio" / room).glob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_import_of_streamlit_anywhere_in_the_file(path) -> None:  # type: ignore[no-untyped-def]
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or "")
    drawing = ("streamlit", "headscope.studio.ui", "headscope.studio.lessons", "headscope.pages")
    assert not {name for name in named if name.startswith(drawing)}


def test_importing_all_of_them_brings_no_streamlit() -> None:
    modules = [f"headscope.studio.{path.parent.name}.{path.stem}" for path in FILES if path.stem != "__init__"]
    code = f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "print('streamlit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", [ROOT / "app.py", *sorted((ROOT / "pages").glob("*.py"))], ids=lambda path: path.stem)
def test_a_page_has_no_text_on_its_own(path) -> None:  # type: ignore[no-untyped-def]
    """Streamlit shows a string that stands alone in a page, such as the docstring of a constant."""
    _, *rest = ast.parse(path.read_text(encoding="utf-8")).body
    assert not [node.lineno for node in rest if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
