"""`python -m sgl_prefix_attn route`, as a user types it."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.__main__ import main


def test_explain_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "explain", "--tree", "1,10/4096,416", "--heads", "32/8", "--stock", "flashinfer"]) == 0
    out = capsys.readouterr().out
    assert "packed (native): " in out
    assert "stock (flashinfer_tc): " in out
    assert "unique_mb: MB of KV, each position once" in out
    assert "\nroute:   " in out


class TestDeprecatedNames:
    @pytest.mark.parametrize("option", [["--inner", "triton"], ["--inner=triton"]])
    def test_an_option_is_read_with_a_warning(
        self, option: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert main(["route", "explain", "--tree", "4/8", *option]) == 0
        assert "stock (triton_gqa): " in capsys.readouterr().out
        assert "--inner is deprecated and will not be read by the next release; use --stock" in caplog.text

    def test_old_and_new_together_are_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            main(["route", "explain", "--tree", "4/8", "--inner", "fa3", "--stock=triton"])
        assert left.value.code == 2
        assert "--inner is the deprecated name of --stock, and both are given" in capsys.readouterr().err
