"""Rates of a device: the table of datasheets, and that measuring gives rates that can be."""

import time

import pytest
import torch

from daguerre.training.performance import peak_rates

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
    ],
)
def test_devices_by_name(name, tflops):
    assert peak_rates.datasheet(name).tflops == tflops


def test_memory_tells_devices_of_one_kind_apart():
    assert peak_rates.datasheet("NVIDIA A100-SXM4-40GB").gb_per_second == 1555
    assert peak_rates.datasheet("NVIDIA A100-SXM4-80GB").gb_per_second == 2039


@pytest.mark.parametrize("name", ["", "Tesla V100-SXM2-16GB", "NVIDIA L400", "AMD Instinct MI300X", "NVIDIA A1000"])
def test_an_unknown_device_has_none(name):
    assert peak_rates.datasheet(name) is None


def test_the_best_of_several_tries_is_a_time_of_one_run(monkeypatch):
    monkeypatch.setattr(peak_rates, "_SECONDS_A_TRY", 0.01)
    seconds = peak_rates.best_seconds(lambda: time.sleep(0.05), CPU)
    assert 0.05 <= seconds < 0.1


def test_rates_of_this_machine(monkeypatch):
    monkeypatch.setattr(peak_rates, "_SECONDS_A_TRY", 0.01)
    assert 1e8 < peak_rates.product_flops(CPU, torch.float32, widest=256) < 1e14
    assert 1e8 < peak_rates.copy_bytes(CPU, megabytes=8) < 1e13


def test_a_product_in_software_alone_is_not_measured_at_its_full_width(monkeypatch):
    monkeypatch.setattr(peak_rates, "_SECONDS_A_TRY", 0.001)
    widths = []

    def slow(left, right):
        widths.append(len(left))
        time.sleep(len(left) / 256 * 0.03)

    rate = peak_rates._product_flops(slow, CPU, torch.float32, widest=4096)
    assert max(widths) == 512
    assert 2 * 512**3 / 0.09 < rate < 2 * 512**3 / 0.06
