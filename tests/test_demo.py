from __future__ import annotations

import pytest

from lowtide import demo


def test_the_demo_is_exact_and_uses_less(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"WIDTH": 32, "HEADS": 4, "LAYERS": 4, "CONTEXT": 32, "BATCH": 4, "STEPS": 2}.items():
        monkeypatch.setattr(demo, name, value)
    plain = demo.train(lambda block, x: block(x))
    ours = demo.train(demo.lowtide.checkpoint)
    assert plain.losses == ours.losses
    assert all((a == b).all() for a, b in zip(plain.gradients, ours.gradients, strict=True))
    assert ours.peak_bytes < plain.peak_bytes
    demo.main()
    assert "losses over 3 steps equal to the last bit: True" in capsys.readouterr().out
