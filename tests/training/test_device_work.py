"""What a device is given to do, counted operator by operator, against closed forms."""

import pytest
import torch
from torch import nn

from daguerre.training.memory_tracker import Live
from daguerre.training.performance import peak_rates
from daguerre.training.performance.peak_rates import Rates
from daguerre.training.performance.work import Watched, Work


def watched(run) -> Work:
    with Watched() as counting:
        run()
    return counting.work


def test_a_product_reads_its_factors_and_writes_its_result():
    left, right = torch.randn(3, 5), torch.randn(5, 7)
    work = watched(lambda: left @ right)
    assert work == Work({("mm", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21)): 1})


def test_views_and_memory_without_numbers_cost_nothing():
    x = torch.randn(4, 6)
    assert watched(lambda: (x.view(6, 4), x.t(), torch.empty(100), x.device)).count == 0
    layer, rows = nn.Linear(6, 3, bias=False), torch.randn(2, 5, 6).transpose(0, 1)
    found = watched(lambda: layer(rows))  # of which the product is one of two dims
    assert {name for name, _, _ in found.launches} == {"clone", "mm"}


def test_what_is_written_in_place_is_read_and_written():
    x, y = torch.randn(10), torch.randn(10)
    assert watched(lambda: x.add_(y)).bytes == 4 * 30
    assert watched(lambda: torch._foreach_add_([x, x.clone()], [y, y])).bytes == 4 * 60 + 80


def test_rows_of_a_table_are_read_alone():
    table, ids = torch.randn(1000, 4), torch.tensor([1, 2])
    assert watched(lambda: table[ids]).bytes == 2 * 2 * 4 * 4


def test_a_backward_pass_has_twice_the_products_and_counts_add_up():
    layer, x = nn.Linear(5, 7, bias=False), torch.randn(3, 5, requires_grad=True)
    whole = watched(lambda: layer(x).sum().backward())
    assert whole.flops == 3 * 2 * 3 * 5 * 7
    assert (whole * 3 + whole).flops == 4 * whole.flops
    assert (whole * 3 + whole).count == 4 * whole.count


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_a_backward_pass_with_a_kernel_of_its_own_is_one_launch_and_takes_one_tensor(name):
    """torch also has it made of other operators, for devices without that kernel."""
    x = torch.randn(1000, requires_grad=True)
    y, given = getattr(nn.functional, name)(x), torch.ones(1000)
    with Live() as live, Watched() as counting:
        y.backward(given)
    assert counting.work == Work({(f"{name}_backward", 0, 3 * 4000): 1})
    assert live.peak == 4000


def test_an_operator_takes_what_its_products_or_its_bytes_take_and_the_host_its_launches():
    work = Work({("mm", 1000, 10): 2, ("add", 0, 400): 1})
    assert work.seconds(Rates("x", 100.0, 100.0, 0.0, 100.0)) == 2 * 10 + 4
    assert work.seconds(Rates("x", 1e9, 1e9, 2.0, 1e9)) == 6.0


@pytest.mark.parametrize(("card", "name"), [(8_000_000_000, "RTX 4060"), (24 << 30, "RTX 4090"), (None, "H100")])
def test_a_card_without_a_name_is_a_usual_one_of_its_memory(card, name):
    rates = peak_rates.assumed(card, True, torch.bfloat16)
    assert rates.device == f"a card such as {name}"
    assert rates.flops < peak_rates.DATASHEETS[name].tflops * 1e12
