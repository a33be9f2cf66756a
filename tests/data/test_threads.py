import pytest

from dlrm.data.threads import map_in_order


def test_map_in_order_gives_results_in_order_and_stops_at_an_error():
    started = []

    def work(job):
        started.append(job)
        return 10 // (5 - job)

    results = map_in_order(work, range(100), 2)
    assert [next(results) for _ in range(5)] == [2, 2, 3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        list(results)
    assert len(started) < 12
