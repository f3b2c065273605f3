"""How far a figure reaches beyond what ran."""

from __future__ import annotations

from tools.common.extrapolation import MOST_TIMES, extrapolation, headline, too_far


def test_what_ran_is_no_extrapolation() -> None:
    assert extrapolation("ranks", 8, 8) is None and extrapolation("ranks", 8, 4) is None
    assert headline([]) == ""


def test_up_to_the_limit_it_is_named_and_beyond_it_it_is_not_to_be_relied_on() -> None:
    near, far = extrapolation("ranks", 8, 8 * MOST_TIMES), extrapolation("ranks", 8, 8 * MOST_TIMES + 1)
    assert near is not None and far is not None and (near.too_far, far.too_far) == (False, True)
    assert headline([near]) == "extrapolated from 8 to 160 ranks"
    assert headline([far]).startswith("extrapolated from 8 to 161 ranks; beyond 20 times what ran no figure")
    assert "bytes" in headline([near, far, extrapolation("bytes", 1e6, 1e12) or near])
    assert not too_far(sum([0.1] * 200)) and too_far(20.01)
