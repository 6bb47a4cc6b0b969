"""How long this node's prefill of a prompt takes, learnt from the prompts it has prefilled."""

from __future__ import annotations

SMOOTHING = 0.3


class PrefillSpeed:
    """Seconds a token by length range (powers of two); not thread safe.

    `start` are seconds of known prompt lengths, from a profile.
    """

    def __init__(self, start: dict[int, float] | None = None) -> None:
        self._per_token: dict[int, float] = {}
        for prompt_len, seconds in (start or {}).items():
            self.learn(prompt_len, seconds)

    def learn(self, prompt_len: int, seconds: float) -> None:
        """A prompt of `prompt_len` tokens took `seconds` of compute."""
        if prompt_len < 1 or seconds <= 0:
            return
        key = prompt_len.bit_length()
        new = seconds / prompt_len
        old = self._per_token.get(key, new)
        self._per_token[key] = old + SMOOTHING * (new - old)

    def expect(self, prompt_len: int) -> float | None:
        """Seconds that such a prompt will take, by its range or the nearest; None at first."""
        if not self._per_token:
            return None
        key = min(self._per_token, key=lambda known: abs(known - prompt_len.bit_length()))
        return self._per_token[key] * prompt_len
