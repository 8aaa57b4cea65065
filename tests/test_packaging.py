"""Which package may import what, what a bare import costs, and what a wheel carries."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UI = {"streamlit", "plotly", "duckdb", "polars", "pyarrow"}
FORBIDDEN = {
    "kernels": UI | {"transformers", "headscope.engine", "headscope.studio", "headscope.pages", "typer", "rich"},
    "engine": UI | {"triton", "headscope.studio", "headscope.pages"},
    "studio": {"triton", "transformers", "headscope.pages"},
    "pages": {"triton", "transformers"},
}
MAY_IMPORT_TRANSFORMERS = {"model/load.py", "model/hook.py", "model/masks.py", "runs/capture.py"}


def imports(path: Path) -> Iterator[str]:
    """Every module name that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = f"headscope.{path.parent.name}" if node.level == 1 else "headscope"
            base = f"{home}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(folder: Path, package: str) -> list[str]:
    """Imports in `folder` that go against the arrows of `package`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for name in imports(path):
            if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN[package]):
                found.append(f"{path.name}: {name}")
            if (
                package == "engine"
                and name.split(".")[0] == "transformers"
                and path.relative_to(folder).as_posix() not in MAY_IMPORT_TRANSFORMERS
            ):
                found.append(f"{path.name}: {name}")
            if name.split(".")[0] in ("engine", "kernels", "studio", "pages"):
                found.append(f"{path.name}: {name} is not imported by its installed name")
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows(package: str) -> None:
    assert breaches(ROOT / package, package) == []


def test_triton_is_imported_inside_functions_only_where_torch_paths_live() -> None:
    """Importing every engine module must not import triton, transformers or a studio package."""
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "engine").rglob("*.py")]
    modules = [".".join(("headscope", *file.parts)).removesuffix(".__init__") for file in files]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "print(sorted({'triton', 'transformers', 'streamlit', 'plotly', 'duckdb', 'polars'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_arrow_test_sees_a_breach(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    from headscope.studio import jobs\n    import polars as pl\n")
    assert len(breaches(tmp_path, "engine")) >= 2


def test_import_without_cuda_is_quick_and_lazy() -> None:
    code = "import time; t = time.perf_counter(); import headscope.engine as e; s = time.perf_counter() - t\n"
    code += "import sys; print(s, 'transformers' in sys.modules, 'triton' in sys.modules)\n"
    code += "from headscope.engine import *\n"
    code += "print(all(getattr(e, name) is not None for name in e.__all__), 'transformers' in sys.modules)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    first, second = done.stdout.splitlines()
    assert float(first.split()[0]) < 3 and first.split()[1:] == ["False", "False"]
    assert second.split() == ["True", "False"]


def test_public_names() -> None:
    """The names of the public API; a missing one breaks a user's import."""
    import headscope.engine as engine

    wanted = "Dense AShape VerticalSlash BlockSparse Fixed Fraction HeadConfig HostProfile Estimator build_index "
    wanted += "sparse_attention dense_attention masked_attention measure_heads apply load_model"
    assert set(wanted.split()) <= set(engine.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git would take along."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    source = folder / "source"
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


def test_every_folder_of_code_is_a_package_with_its_line() -> None:
    """A folder that `packages` leaves out is missing from the wheel, while a checkout works as ever."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for floor in FORBIDDEN for path in (ROOT / floor).rglob("*.py")}
    assert {".".join(("headscope", *folder.parts)) for folder in folders} == listed - {
        "headscope",
        "headscope.sample_prompts",
    }
    for folder in folders - {Path("pages")}:  # Streamlit would list a module of that name as a page
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder}/__init__.py has no docstring that says what the folder holds"


@pytest.mark.slow
def test_the_wheel_carries_all_and_nothing_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"headscope", wheel.name.split("-py3")[0] + ".dist-info"}
    for name in (
        "engine/cli/main.py",
        "kernels/cells/layout.py",
        "sample_prompts/code.txt",
        "sample_prompts/index.json",
    ):
        assert f"headscope/{name}" in names
    ours = [path for part in ("pages", "studio", "engine", "kernels") for path in (ROOT / part).rglob("*.py")]
    ours += [ROOT / "app.py"] if (ROOT / "app.py").exists() else []
    for path in ours:
        assert f"headscope/{path.relative_to(ROOT)}" in names
    assert not [name for name in names if name.startswith("headscope/tests")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_runs_beside_the_public_kernels_package(wheel: Path, tmp_path: Path) -> None:
    """A clean venv with the wheel and the public package called `kernels`: both import, and so does transformers."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "torch==2.13.0", "kernels"], check=True, capture_output=True)
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    code = (
        "import importlib.util, kernels, transformers, headscope.engine as e, headscope.kernels.cells.layout as l\n"
        "from transformers import LlamaForCausalLM\n"
        "from headscope.engine import VerticalSlash, build_index, sparse_attention\n"
        "from headscope.engine.prompts.sources import list_prompts\n"
        "import torch\n"
        "assert 'headscope' not in kernels.__file__ and 'headscope' in l.__file__\n"
        "assert all(importlib.util.find_spec(n) is None for n in ('streamlit', 'plotly', 'duckdb', 'polars'))\n"
        "q, k = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16)\n"
        "out, lse = sparse_attention(q, k, k, build_index(q, k, [VerticalSlash(8, 8)] * 4))\n"
        "assert out.isfinite().all() and len(list_prompts()) >= 6\n"
        "print('all good')\n"
    )
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all good", done.stderr
    done = subprocess.run(
        [str(python.parent / "headscope"), "prompt"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "needle" in done.stdout, done.stderr
