"""The data structures of metrics: histograms and their quantiles, rates over a window."""

import pytest

from jaxinfer.server.metrics.histograms import Histogram, token_count_bounds
from jaxinfer.server.metrics.tally import Rates


class TestHistogram:
    def test_a_bound_belongs_to_its_bucket(self) -> None:
        histogram = Histogram((1.0, 2.0))
        for value in (0.5, 1.0, 1.5, 2.0, 2.5):
            histogram.observe(value)
        assert histogram.counts == [2, 2, 1]
        assert histogram.total == 7.5

    @pytest.mark.parametrize(
        ("share", "value"), [(0.0, 0.0), (0.25, 5.0), (0.5, 10.0), (0.75, 15.0), (1.0, 20.0)]
    )
    def test_quantile_is_linear_in_a_bucket(self, share: float, value: float) -> None:
        histogram = Histogram((10.0, 20.0, 30.0))
        histogram.observe(4.0, 50)
        histogram.observe(14.0, 50)
        assert histogram.quantile(share) == pytest.approx(value)

    def test_quantile_above_all_bounds(self) -> None:
        histogram = Histogram((1.0, 2.0))
        histogram.observe(100.0)
        assert histogram.quantile(0.5) == 2.0

    def test_quantile_of_nothing(self) -> None:
        assert Histogram((1.0,)).quantile(0.5) is None

    @pytest.mark.parametrize(
        ("largest", "bounds"),
        [(1, (1,)), (100, (1, 2, 5, 10, 20, 50, 100)), (499, (1, 2, 5, 10, 20, 50, 100, 200))],
    )
    def test_token_bounds(self, largest: int, bounds: tuple[int, ...]) -> None:
        assert token_count_bounds(largest) == bounds


class TestRates:
    def test_over_the_window(self) -> None:
        rates = Rates(window=10.0)
        for second in range(31):
            rates.mark(float(second), (second * (5.0 if second < 15 else 7.0),))
        assert rates.read(30.0, (210.0,)) == ((30 * 7 - 20 * 7) / 10,)

    def test_a_mark_as_old_as_the_window_is_kept(self) -> None:
        rates = Rates(window=10.0)
        for second, tokens in ((0.0, 0.0), (8.0, 60.0), (12.0, 60.0)):
            rates.mark(second, (tokens,))
        assert rates.read(12.0, (60.0,)) == (5.0,)

    def test_an_idle_engine_slows_to_nothing(self) -> None:
        rates = Rates(window=10.0)
        rates.mark(0.0, (0.0,))
        rates.mark(1.0, (50.0,))
        assert rates.read(5.0, (50.0,)) == (10.0,)
        assert rates.read(60.0, (50.0,)) == (0.0,)

    def test_before_the_first_mark(self) -> None:
        assert Rates().read(5.0, (1.0, 2.0)) == (0.0, 0.0)
