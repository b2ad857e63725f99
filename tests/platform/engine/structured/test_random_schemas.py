"""A sample of `benchmarks.structured`: random schemas on a random model."""

from benchmarks.structured import run


def test_answers_end_and_are_valid() -> None:
    report = run(40)
    assert (report.asked, report.failed, report.wrong) == (40, [], [])
    assert report.finished >= 36
