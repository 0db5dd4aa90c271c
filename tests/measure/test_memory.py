import torch

from autoprec.measure import measure_peak_memory

MEGABYTE = 4 * 1000 * 250  # of fp32 values


def _block() -> torch.Tensor:
    return torch.ones(1000, 250)


def test_what_lives_at_the_same_time_is_counted_and_what_was_freed_is_not():
    def step():
        first = _block()
        second = first + 1
        del first
        return second * 2

    assert measure_peak_memory(step) == 2 * MEGABYTE


def test_views_and_in_place_results_take_nothing():
    held = _block()
    assert measure_peak_memory(lambda: held.view(-1).mul_(2).t()) == 0


def test_activations_saved_for_backward_are_counted():
    weight = torch.ones(1000, 250, requires_grad=True)

    def chain(length: int) -> int:
        def step():
            x = weight
            for _ in range(length):
                x = x.sin()
            x.sum().backward()
            weight.grad = None

        return measure_peak_memory(step)

    assert chain(6) - chain(3) == 3 * MEGABYTE
