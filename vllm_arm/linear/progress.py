# SPDX-License-Identifier: Apache-2.0
"""A bar for layers that are quantised while a model loads, beside vLLM's for the checkpoint's files."""

from tqdm.auto import tqdm


class LayerProgress:
    """Counts the layers of a model: all of them are expected before the first is done."""

    def __init__(self) -> None:
        self._waiting = 0
        self._is_shown = True
        self._bar: tqdm[object] | None = None

    def expect(self, is_shown: bool) -> None:
        """A layer is to come; no bar is shown where ``is_shown`` is false, or where stderr is no terminal."""
        self._waiting += 1
        self._is_shown = is_shown

    def done(self) -> None:
        """The next layer is quantised. One that nobody expected, as in a second load, does not count."""
        if not self._waiting:
            return
        if self._bar is None:
            disable = None if self._is_shown else True
            self._bar = tqdm(total=self._waiting, desc="Quantising layers", unit="layer", disable=disable)
        self._bar.update()
        self._waiting -= 1
        if not self._waiting:
            self._bar.close()
            self._bar = None


layers = LayerProgress()
"""Of the model that this process loads."""
