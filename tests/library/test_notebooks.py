"""The notebooks of examples/notebooks run as they stand, in one folder: the third reads what the first trained."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
ORDER = ("train_and_draw", "metrics_in_pandas", "samplers_on_diffusers")


def test_there_is_no_other_and_no_outputs_are_kept():
    assert {path.stem for path in FOLDER.iterdir()} == {*ORDER}
    for name in ORDER:
        cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_the_notebooks_run(tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    import nbformat

    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    shown = {}
    for name in ORDER:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
        client.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
        shown[name] = json.dumps(notebook)
    assert "runs/notebook" in shown["train_and_draw"]
    assert "image/png" in shown["train_and_draw"], "the sheet of images"
    assert "samples_per_second" in shown["metrics_in_pandas"]
    assert "% away" in shown["samplers_on_diffusers"]
