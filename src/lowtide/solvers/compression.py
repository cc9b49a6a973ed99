"""Values that may be held encoded by a lossy codec, their costs at a price per byte, and baselines that encode values.

A value that the forward holds for the backward (a saved tensor, or the input of a region) is held as it is or encoded:
fewer bytes for the seconds to encode it once and to decode it at least once. Given a price per byte each value decides
independently, as ops do inside regions, so `hull.Pricing` stays exact and its bound stays valid.

Only first outputs of ops are encoded. Further outputs (means, log-sums) are small, and an error in one of them scales
whole tensors. Skipped unless the user passes `lossy=`; then the search has one more hull per critical point.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from lowtide.errors import PlanError
from lowtide.graph.codec_costs import CODEC_COSTS, LOSSLESS, EncodedForm, encoded_form
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.candidate import Codecs, Regions, some_subsets

_MOST_CUTS = 8  # lengths of prefixes and suffixes of encoded values


def lossy_codecs(lossy: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The codec names in `lossy`. Raises `ValueError` for unknown names and for the lossless codec."""
    names = (lossy,) if isinstance(lossy, str) else () if lossy is None else lossy
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"lossy is {lossy!r}: it must be None, or the name of a codec, or several in a tuple")
    if lossy is not None and not names:
        raise ValueError("lossy names no codec: leave it out, or choose from " + ", ".join(map(repr, CODEC_COSTS)))
    for name in names:
        if name == LOSSLESS:
            raise ValueError(
                f"{LOSSLESS!r} is not lossy, and what it saves depends on the numbers in a value, so that no plan can "
                f"count on it. Lossy codecs are {', '.join(map(repr, CODEC_COSTS))}."
            )
        if name not in CODEC_COSTS:
            raise ValueError(f"lossy has {name!r}, and the codecs are {', '.join(map(repr, CODEC_COSTS))}")
    return tuple(dict.fromkeys(names))


class CompressionOptions:
    """The values of a graph that these codecs can encode, and the bytes and seconds of each form."""

    def __init__(self, graph: StepGraph, names: tuple[str, ...]) -> None:
        if not graph.hardware.memory_bytes_per_s:
            raise PlanError(
                f"lossy={names} was given, and the speed of {graph.hardware.name}'s memory is not known, so the "
                "cost of a codec cannot be predicted. Trace for a known device, by name (device='H100') if absent."
            )
        self.graph, self._names = graph, names
        self.options: dict[int, list[EncodedForm]] = {}
        for value in sorted(_encodable(graph)):
            forms = [encoded_form(graph.values[value], name, graph.hardware) for name in names]
            if known := [form for form in forms if form is not None]:
                self.options[value] = known
        self._is_read = {save.value for save in graph.saves if save.read >= 0}

    def on(self, graph: StepGraph) -> CompressionOptions:
        """The same options for the step's graph with segments."""
        options = copy(self)
        options.graph = graph
        return options

    def form(self, value: int, codec: str) -> EncodedForm:
        return next(form for form in self.options[value] if form.codec == codec)

    def least_s(self, value: int, form: EncodedForm) -> float:
        """The least seconds of a form: one encode, and one decode if any reader exists (each reader decodes again)."""
        return form.encode_s + (form.decode_s if value in self._is_read else 0.0)

    @property
    def total_s(self) -> float:
        """An upper bound on the sum of `least_s` over all values."""
        return sum(max(self.least_s(value, form) for form in forms) for value, forms in self.options.items())

    @property
    def everything(self) -> Codecs:
        """Every value in its smallest form."""
        fewest = {value: min(forms, key=lambda form: form.bytes) for value, forms in self.options.items()}
        return tuple((value, form.codec) for value, form in fewest.items())

    def baseline_choices(
        self, plans: list[tuple[float, Regions]], ends: list[tuple[float, Regions]]
    ) -> list[tuple[float, Regions, Codecs]]:
        """Baselines with encoded values, each with a lower bound on its seconds, the fastest first.

        `plans` (seconds and regions) with every value encoded that they hold; and `ends`, and no regions at all, with
        every subset of few values encoded, or prefixes and suffixes of many.
        """
        every = self.everything
        choices = [(seconds + self._seconds_of(every, regions), regions, every) for seconds, regions in plans]
        of_one_codec = [
            tuple((value, name) for value, forms in self.options.items() if name in [form.codec for form in forms])
            for name in self._names
        ]
        for seconds, regions in [(0.0, {}), *ends]:
            left = [
                tuple((value, form.codec) for value, form in self.left_behind(codecs, regions).items())
                for codecs in (every, *of_one_codec)
            ]
            parts = dict.fromkeys(part for codecs in left for part in some_subsets(codecs, _MOST_CUTS))
            choices += [(seconds + self._seconds_of(part, regions), regions, part) for part in parts]
        return sorted(choices, key=lambda plan: plan[0])

    def _seconds_of(self, codecs: Codecs, regions: Regions) -> float:
        return sum(self.least_s(value, form) for value, form in self.left_behind(codecs, regions).items())

    def left_behind(self, codecs: Codecs, regions: Regions) -> dict[int, EncodedForm]:
        """Of these values, those that the forward holds with these regions and that no region retains."""
        graph = self.graph
        owner = graph.innermost(regions)
        held = {save.value for save in graph.saves if owner[save.call] < 0}
        kept: set[int] = set()
        for call, ops in regions.items():
            if owner[graph.calls[call].parent] < 0:
                held.update(graph.calls[call].inputs)
            kept.update(value for op in ops for value in graph.ops[graph.calls[call].first + op].outputs)
        return {value: self.form(value, codec) for value, codec in codecs if value in held and value not in kept}


def _encodable(graph: StepGraph) -> set[int]:
    """Activations that the engine can encode: saved only in modules, not made of weights alone, not written later."""
    first_save: dict[int, int] = {}
    outside: set[int] = set()
    for save, (call, _) in zip(graph.saves, graph.save_numbers, strict=True):
        first_save[save.value] = min(first_save.get(save.value, save.made), save.made)
        outside |= {save.value} if call < 0 else set()
    encodable = set()
    for value in first_save.keys() - outside:
        facts = graph.values[value]
        is_first_output = facts.kind == "activation" and graph.ops[facts.born].outputs[0] == value
        if is_first_output and not graph.is_made_of_weights(value):
            encodable.add(value)
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        encodable -= {value for value in op.mutates if index >= first_save.get(value, index)}
    return encodable


class EncodingCharges:
    """Costs of calls for values that may be encoded, each in its best form for a price.

    `pairs` are calls and the values charged to them; all bytes are multiplied by `scale`.
    """

    def __init__(
        self, compression: CompressionOptions, pairs: list[tuple[int, int]], num_calls: int, scale: float
    ) -> None:
        self._num_calls = num_calls
        self._calls = np.array([call % num_calls for call, _ in pairs], dtype=np.int64)
        self._values = [value for _, value in pairs]
        self._codecs = [("", *(form.codec for form in compression.options[value])) for value in self._values]
        most = max(map(len, self._codecs), default=1)
        self._bytes, self._seconds = np.zeros((len(pairs), most)), np.full((len(pairs), most), np.inf)
        for row, value in enumerate(self._values):
            self._bytes[row, 0], self._seconds[row, 0] = compression.graph.values[value].bytes * scale, 0.0
            for column, form in enumerate(compression.options[value], start=1):
                self._bytes[row, column] = form.bytes * scale
                self._seconds[row, column] = compression.least_s(value, form)

    def costs(self, price: float) -> np.ndarray:
        """The cost of each call at a price."""
        if not self._values:
            return np.zeros(self._num_calls)
        least = (price * self._bytes + self._seconds).min(axis=1)
        return np.bincount(self._calls, weights=least, minlength=self._num_calls)

    def chosen(self, price: float) -> dict[int, list[tuple[float, float, int, str]]]:
        """For each call, the values charged to it: bytes, seconds, value and codec (`""`: not encoded)."""
        by_call: dict[int, list[tuple[float, float, int, str]]] = {}
        if self._values:
            forms = (price * self._bytes + self._seconds).argmin(axis=1)
            for row, (call, form) in enumerate(zip(self._calls.tolist(), forms.tolist(), strict=True)):
                size, seconds = float(self._bytes[row, form]), float(self._seconds[row, form])
                by_call.setdefault(call, []).append((size, seconds, self._values[row], self._codecs[row][form]))
        return by_call
