"""`daguerre doctor`: what it finds, and that each thing that is missing comes with what mends it."""

from importlib.metadata import PackageNotFoundError

import pytest

from daguerre import __version__
from daguerre.cli import doctor
from daguerre.errors import UserError, install


def test_on_this_machine(capsys):
    code = doctor.run([])
    text = capsys.readouterr().out
    for word in (__version__, "torch", "diffusers", "cpu", "cores", "memory", "disk", "recipes", "quickstart"):
        assert word in text
    assert code == ("!!" in text)
    assert ("->" in text) or "Nothing is missing" in text


def test_a_package_that_is_missing_or_too_old(monkeypatch):
    def version(name):
        if name == "pillow":
            raise PackageNotFoundError(name)
        return "1.0" if name == "torch" else "999.0"

    monkeypatch.setattr(doctor, "version", version)
    found = {finding.what: finding for finding in doctor._packages()}
    assert found["pillow"].mark == found["torch"].mark == "!!"
    assert found["pillow"].fix.startswith(f"{install()} 'pillow>=")
    assert found["torch"].fix.startswith(f"{install()} 'torch>=")
    assert found["safetensors"].mark == "ok"
    assert "pytest" not in found


def test_packages_that_only_some_settings_need(monkeypatch):
    def version(name):
        if name == "datasets":
            raise PackageNotFoundError(name)
        return "999.0"

    monkeypatch.setattr(doctor, "version", version)
    found = {finding.what: finding for finding in doctor._extras()}
    assert set(found) == set(doctor.EXTRAS)
    assert (found["datasets"].mark, found["datasets"].fix) == ("--", "")
    assert found["datasets"].text.endswith(install("datasets"))
    assert found["prodigyopt"].mark == "ok"


def test_missing_networks_and_recipes_come_with_a_command(monkeypatch, tmp_path):
    for found, parts in zip(doctor._assets(tmp_path), doctor.SHIPPED.values(), strict=True):
        assert found.mark == "!!"
        assert ", ".join(parts) in found.text
        assert found.fix
    monkeypatch.setattr(doctor.recipe, "FOLDER", tmp_path)
    (found,) = doctor._recipes()
    assert (found.mark, bool(found.fix)) == ("!!", True)


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(doctor, "GPU_FILES", (str(driver),))

    class Torch:
        class version:
            cuda = hip = None

        class cuda:
            is_available = staticmethod(lambda: False)

    found = list(doctor._devices(Torch))[-1]
    assert found.mark == "!!"
    assert "TORCH_INDEX" in found.fix
    monkeypatch.setattr(doctor, "GPU_FILES", ())
    assert list(doctor._devices(Torch))[-1].mark == "--"
    assert [finding.what for finding in doctor._devices(None)] == ["cpu"]


@pytest.mark.parametrize(("flags", "told"), [("avx512f avx512_bf16", True), ("amx_bf16", True), ("avx2", False)])
def test_a_cpu_that_multiplies_bf16_is_told_of_it(monkeypatch, flags, told):
    monkeypatch.setattr(doctor.system, "cpu_facts", lambda: f"flags\t\t: fpu {flags} vme\n")
    (found,) = doctor._devices(None)
    assert ("mixed_precision=bf16 is faster" in found.text) == told


def test_what_is_to_be_mended_is_printed_and_is_the_exit_code(capsys):
    broken = doctor.Finding("!!", "torch", "not installed", "pip install torch")
    assert doctor._conclude([broken]) == 1
    assert capsys.readouterr().out.strip() == "torch: not installed\n  -> pip install torch"
    assert doctor._conclude([doctor.Finding("ok", "torch", "2.13")]) == 0


def test_it_takes_no_arguments():
    with pytest.raises(UserError, match="no arguments"):
        doctor.run(["x"])
