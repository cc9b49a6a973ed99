"""Small steps for tests: random ones that could have run, repeated blocks, and plans for them.

Seconds and link speeds are binary fractions, so that sums of them are exact and ties are ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lowtide.graph import Call, Hardware, Op, Save, StepGraph, Value
from lowtide.graph.codec_costs import CODEC_COSTS, LOSSLESS
from lowtide.graph.segments import with_structures
from lowtide.plans import Move, Plan, Recompute

NAMES = ("mm", "gelu", "add", "norm", "softmax")


@dataclass
class _Draft:
    """A step being written down. `needed_until` is the first position at which Python may drop each value."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)  # read and released are known when the backward is written
    calls: list[Call] = field(default_factory=list)
    needed_until: dict[int, int] = field(default_factory=dict)
    saves_of: dict[int, list[int]] = field(default_factory=dict)  # by forward op

    def value(self, size: int, kind: str, name: str, born: int = -1) -> int:
        self.values.append(Value(size, kind, name, born, born + 1))
        self.need(len(self.values) - 1, born + 1)
        return len(self.values) - 1

    def need(self, value: int, until: int) -> None:
        self.needed_until[value] = max(self.needed_until.get(value, 0), until)

    def op(self, op: Op, *, saved: Iterable[int] = ()) -> None:
        """The next op. Python holds what it reads, but for what is `saved`."""
        self.ops.append(op)
        for value in {*op.inputs, *op.mutates} - set(saved):
            self.need(value, len(self.ops))

    def save(self, op: int, value: int, made: int) -> None:
        self.saves_of.setdefault(op, []).append(len(self.saves))
        self.saves.append(Save(value, self.ops[op].call, made, -1, -1))
        self.need(value, made)

    def open_call(self, path: str, kind: str, parent: int) -> int:
        self.calls.append(Call(path, kind, parent, len(self.ops), len(self.ops), (), ()))
        return len(self.calls) - 1

    def close_call(self, call: int, first_save: int, more_inputs: tuple[int, ...] = ()) -> None:
        """End `call` here. Its inputs are all it reads or saves that was made before it, and `more_inputs`."""
        first, end = self.calls[call].first, len(self.ops)
        used = {v for op in self.ops[first:end] for v in (*op.inputs, *op.mutates)}
        used |= {save.value for save in self.saves[first_save:]} | set(more_inputs)
        used |= {v for inner in self.calls[call + 1 :] for v in inner.inputs}
        inputs = tuple(sorted(v for v in used if self.values[v].born < first))
        for value in inputs:
            self.need(value, first)
        outputs = self.ops[end - 1].outputs if end > first else ()
        self.calls[call] = replace(self.calls[call], end=end, inputs=inputs, outputs=outputs)

    def graph(self, num_forward: int, drop: Callable[[int], int], hardware: Hardware, **static: int) -> StepGraph:
        """The step. `drop(value)` says how long Python holds a value beyond its last use."""
        last = len(self.ops)
        for index, value in enumerate(self.values):
            dropped = last if value.kind == "gradient" or value.born < 0 else self.needed_until[index] + drop(index)
            self.values[index] = replace(value, dropped=min(dropped, last))
        calls = with_structures(self.ops, self.calls, self.values, self.saves)
        return StepGraph(
            tuple(self.ops), num_forward, tuple(self.values), tuple(self.saves), tuple(calls), hardware, **static
        )


def chain(
    sizes: list[int], *, seconds: float = 1.0, gradient_bytes: int = 0, link_bytes_per_s: float = 0.0
) -> StepGraph:
    """Calls `layers.0`, `layers.1`, … of one op each, that makes a value of the given size and saves its input.

    The batch has 1 byte. Backward op i reads the save of layer i and a gradient as large as the layer's output; it
    makes a gradient as large as its input, and for the parameter one of `gradient_bytes`.
    """
    draft = _Draft()
    model = draft.open_call("", "Model", -1)
    inputs = [draft.value(1, "batch", "x")]
    for index, size in enumerate(sizes):
        call = draft.open_call(f"layers.{index}", "Layer", model)
        first_save = len(draft.saves)
        made = draft.value(size, "activation", f"y{index}", born=index)
        draft.op(Op("mm", call, seconds, 0, (inputs[-1],), (made,)))
        draft.save(index, inputs[-1], index + 1)
        draft.close_call(call, first_save)
        inputs.append(made)
    draft.close_call(model, 0)
    gradient = inputs.pop()  # stands for its own gradient
    for index in range(len(sizes) - 1, -1, -1):
        at = len(draft.ops)
        saved = inputs.pop()
        draft.saves[index] = replace(draft.saves[index], read=at, released=at + 1)
        outputs = []
        if index > 0:
            outputs.append(draft.value(sizes[index - 1], "activation", f"dy{index - 1}", born=at))
        if gradient_bytes:
            outputs.append(draft.value(gradient_bytes, "gradient", f"dw{index}", born=at))
        call = draft.ops[index].call
        draft.op(
            Op("mm_backward", call, seconds, 0, (gradient, saved), tuple(outputs), forward_op=index), saved=[saved]
        )
        gradient = outputs[0] if index > 0 else -1
    return draft.graph(len(sizes), lambda value: 0, Hardware("test", link_bytes_per_s=link_bytes_per_s))


def random_graph(seed: int, *, num_ops: int = 12) -> StepGraph:
    """A step of up to `num_ops` forward ops in nested module calls, with whatever is allowed to happen in one."""
    rng = random.Random(seed)
    draft = _Draft()
    for kind in ("parameter", "parameter", "buffer", "batch", "constant", "elsewhere", "gradient"):
        draft.value(rng.randrange(1, 9), kind, kind)
    model = draft.open_call("", "Model", -1)
    _grow(draft, rng, model, rng.randint(1, num_ops), depth=0)
    draft.close_call(model, 0)
    if rng.random() < 0.5:
        _forward_op(draft, rng, -1)  # a loss outside of the model
    return _finish(draft, rng)


def repeated_blocks(seed: int, *, num_blocks: int = 4) -> StepGraph:
    """A step of identical blocks, each of which reads its own parameter and what the block before it made."""
    rng = random.Random(seed)
    draft = _Draft()
    hidden = draft.value(8, "batch", "x")
    model = draft.open_call("", "Model", -1)
    for index in range(num_blocks):
        block_rng = random.Random(seed)
        first_save, block = len(draft.saves), draft.open_call(f"blocks.{index}", "Block", model)
        weight = draft.value(4, "parameter", f"blocks.{index}.weight")
        local = [weight, hidden]
        for part in ("attention", "mlp"):
            inner_first_save, inner = len(draft.saves), draft.open_call(f"blocks.{index}.{part}", part, block)
            for _ in range(block_rng.randint(1, 3)):
                local.append(_forward_op(draft, block_rng, inner, among=local))
            draft.close_call(inner, inner_first_save)
        draft.close_call(block, first_save)
        hidden = local[-1]
    draft.calls[model] = replace(draft.calls[model], end=len(draft.ops))
    return _finish(draft, rng, tidy=True)


def seldom_saved(seed: int, *, num_blocks: int = 2, num_ops: int = 9, share_saved: float = 0.2) -> StepGraph:
    """A step of blocks of ops that read what few before them made. A share of that is saved; some is held a while."""
    rng = random.Random(seed)
    draft = _Draft()
    hidden = draft.value(8, "batch", "x")
    model = draft.open_call("", "Model", -1)
    for index in range(num_blocks):
        first_save, block = len(draft.saves), draft.open_call(f"blocks.{index}", "Block", model)
        made = [hidden]
        for number in range(num_ops):
            at, inputs = len(draft.ops), rng.sample(made[-3:], min(len(made), rng.choice((1, 1, 2))))
            made.append(draft.value(rng.randint(1, 40), "activation", "y", born=at))
            draft.op(Op(rng.choice(NAMES), block, rng.randrange(9) / 8, 0, tuple(inputs), (made[-1],)))
            if number == num_ops - 1 or rng.random() < share_saved:
                draft.save(at, made[-1], at + 1)
        draft.close_call(block, first_save)
        hidden = made[-1]
    draft.calls[model] = replace(draft.calls[model], end=len(draft.ops))
    graph = _finish(draft, rng, tidy=True)
    holds = [rng.choice((0, 0, 1, 3)) if value.born >= 0 else 0 for value in graph.values]
    values = [
        replace(value, dropped=min(value.dropped + hold, len(graph.ops)))
        for value, hold in zip(graph.values, holds, strict=True)
    ]
    return replace(graph, values=tuple(values))


def hidden_wide_narrow(num_blocks: int, *, hidden_s: float) -> StepGraph:
    """A step that peaks at its loss, of blocks of three ops: one of `hidden_s` seconds, a fast one that makes much, a
    slow one. What the last two make is saved inside the block; what the first makes is saved by nobody.
    """
    draft = _Draft()
    hidden = draft.value(8, "batch", "x")
    model = draft.open_call("", "Model", -1)
    for index in range(num_blocks):
        first_save, block = len(draft.saves), draft.open_call(f"blocks.{index}", "Block", model)
        for size, seconds, is_saved in ((5, hidden_s, False), (100, 1 / 8, True), (4, 4.0, True)):
            at, made = len(draft.ops), draft.value(size << 12, "activation", "y", born=len(draft.ops))
            draft.op(Op("mm", block, seconds, 0, (hidden,), (made,)))
            if is_saved:
                draft.save(at, made, at + 1)
            hidden = made
        draft.close_call(block, first_save)
    draft.calls[model] = replace(draft.calls[model], end=len(draft.ops))
    loss = draft.value(1, "activation", "loss", born=len(draft.ops))
    draft.op(Op("loss", -1, 1.0, 0, (hidden,), (loss,), workspace_bytes=1000 << 12))
    return _finish(draft, random.Random(0), tidy=True)


def with_floats(seed: int, graph: StepGraph) -> StepGraph:
    """The same step with values a thousand times as large, or more, most of them floats that codecs take."""
    rng = random.Random(seed)
    scale = rng.choice((1024, 8192))
    sizes = [(rng.choice((0, 2, 4, 4, 8)), rng.choice((1, 24, 999))) for _ in graph.values]
    values = [
        replace(value, bytes=scale * value.bytes, item_bytes=item_bytes, row_length=row_length)
        for value, (item_bytes, row_length) in zip(graph.values, sizes, strict=True)
    ]
    hardware = replace(
        graph.hardware,
        link_bytes_per_s=scale * graph.hardware.link_bytes_per_s,
        memory_bytes_per_s=float(scale * rng.choice((1 << 12, 1 << 15, 1 << 18))),
        block_bytes=rng.choice((1, 512)),
    )
    return replace(graph, values=tuple(values), hardware=hardware)


def with_host_line(seed: int, graph: StepGraph, *, syncs: float = 0.05) -> StepGraph:
    """The same step with two time lines: the host limits it, or the device, or now the one and now the other."""
    rng = random.Random(seed)
    scale = rng.choice((1 / 16, 1 / 2, 1.0, 4.0))
    ops = [
        replace(
            op,
            host_s=scale * rng.randrange(9) / 8 + 1 / 128,
            flags=(*op.flags, "sync") if rng.random() < syncs else op.flags,
        )
        for op in graph.ops
    ]
    fees = dict(region_s=rng.choice((0, 1 / 4)), save_s=rng.choice((0, 1 / 16)), dispatch_s=rng.choice((0, 1 / 16)))
    hardware = replace(graph.hardware, spare_s=rng.choice((0, 1 / 8)), move_s=rng.choice((0, 1 / 8)), **fees)
    graph = replace(graph, ops=tuple(ops), hardware=hardware)
    return replace(graph, step_s=graph.lines.step_s)


def drawing(graph: StepGraph, seed: int, share: float = 0.3) -> StepGraph:
    """The same step, with a share of the forward's ops drawing random numbers."""
    rng = random.Random(seed)
    ops = [
        replace(op, flags=(*op.flags, "random")) if index < graph.num_forward and rng.random() < share else op
        for index, op in enumerate(graph.ops)
    ]
    return replace(graph, ops=tuple(ops))


def random_plan(seed: int, graph: StepGraph) -> Plan:
    """Regions of any nesting, outputs retained in the outermost, moves where there is a link, and codecs for floats.

    Of the outputs that are retained, some are moved.
    """
    rng = random.Random(seed)
    nth = {call: n for calls in graph.calls_by_path.values() for n, call in enumerate(calls)}
    share = rng.choice((0.0, 0.3, 0.6, 0.9))
    planned = [call for call in range(len(graph.calls)) if rng.random() < share and call not in graph.unreplayable]
    regions = []
    for index in planned:
        call, outer = graph.calls[index], graph.calls[index].parent
        while outer >= 0 and outer not in planned:
            outer = graph.calls[outer].parent
        ops = range(call.end - call.first) if outer < 0 else ()
        missing = graph.retainable.missing({**dict.fromkeys(planned, ()), index: ops}).get(index, ())
        kept = [op for op in ops if op not in missing and rng.random() < 0.7]
        regions.append(Recompute(call.path, nth[index], tuple(kept)))
    moves: list[Move] = []
    counts: dict[int, int] = {}
    share = rng.choice((0.0, 0.3, 0.8))
    ways = [("host", "")] if graph.hardware.link_bytes_per_s else []
    if graph.hardware.memory_bytes_per_s:
        ways += [(to, codec) for to in ("device", *(to for to, _ in ways)) for codec in (*CODEC_COSTS, LOSSLESS)]
    way_of = {save.value: rng.choice(ways) for save in graph.saves} if ways else {}
    for save in graph.saves:
        number = counts.setdefault(save.call, 0)
        counts[save.call] += 1
        inputs = graph.calls[save.call].inputs if save.call in planned else None
        if save.call >= 0 and ways and rng.random() < share and (inputs is None or number < len(inputs)):
            value = save.value if inputs is None else inputs[number]
            if value in way_of:
                moves.append(Move(graph.calls[save.call].path, nth[save.call], number, *way_of[value]))
    coded = {value for value, (to, codec) in way_of.items() if (to, codec) != ("host", "")}
    for region in regions if graph.hardware.link_bytes_per_s else ():
        first = graph.calls[graph.calls_by_path[region.path][region.nth]].first
        for op in region.keep_ops:
            outputs = graph.ops[first + op].outputs
            if outputs and outputs[0] not in coded and rng.random() < share:
                moves.append(Move(region.path, region.nth, op=op))
    rng.shuffle(regions)
    return Plan(tuple(regions), tuple(moves), in_flight_bytes=rng.choice((0, 0, 1, 40, 1000)))


def _grow(draft: _Draft, rng: random.Random, call: int, num_ops: int, depth: int) -> None:
    """Ops and calls inside `call`, `num_ops` ops in all."""
    path = draft.calls[call].path
    while num_ops > 0:
        if depth < 3 and rng.random() < 0.5:
            inside = rng.randint(0, num_ops)
            name = rng.choice("abc")  # a path can come twice
            first_save, before = len(draft.saves), len(draft.values)
            inner = draft.open_call(f"{path}.{name}".lstrip("."), "Block", call)
            _grow(draft, rng, inner, inside, depth + 1)
            unused = tuple(rng.sample(range(before), 1)) if rng.random() < 0.2 else ()
            draft.close_call(inner, first_save, unused)
            num_ops -= max(inside, 1)
        else:
            _forward_op(draft, rng, call)
            num_ops -= 1


def _forward_op(draft: _Draft, rng: random.Random, call: int, among: list[int] | None = None) -> int:
    """One op, and what it saves. Gives the value that it makes, or one that it reads where it is a view."""
    at = len(draft.ops)
    known = list(range(len(draft.values))) if among is None else among
    inputs = [known[-1], *(rng.choice(known) for _ in range(rng.randint(0, 2)))]
    sizes = [rng.choice((0, *range(1, 40))) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    made = [draft.value(size, "activation" if size else "elsewhere", "y", born=at) for size in sizes]
    mutates = (inputs[0],) if not made and rng.random() < 0.3 else ()
    name, seconds, workspace = rng.choice(NAMES), rng.randrange(9) / 8, rng.choice((0, 0, 0, 16))
    draft.op(Op(name, call, seconds, 0, tuple(inputs), tuple(made), mutates, workspace))
    for value in inputs + made + rng.sample(known, 1):
        if rng.random() < 0.4:
            early = value not in made and rng.random() < 0.5
            draft.save(at, value, at if early else at + 1)
    return made[-1] if made else inputs[0]


def _finish(draft: _Draft, rng: random.Random, *, tidy: bool = False) -> StepGraph:
    """Write the backward. Unless it is `tidy`, saves may go unread or live on, and ops may change places."""
    num_forward = len(draft.ops)
    order = list(range(num_forward - 1, -1, -1))
    for index in range(len(order) - 1):
        if not tidy and rng.random() < 0.1:
            order[index], order[index + 1] = order[index + 1], order[index]
    gradients: list[int] = []
    for forward_op in order:
        if forward_op in draft.saves_of or rng.random() < 0.8:
            _backward_op(draft, rng, forward_op, gradients, tidy)
    for index, save in enumerate(draft.saves):
        draft.saves[index] = replace(save, released=min(save.released, len(draft.ops)))
    hold = {v: rng.choice((0, 0, 0, 1, 4, 1000)) for v in range(len(draft.values))}
    link = rng.choice((0, 1, 8, 32, 256))
    static = dict(optimizer_state_bytes=16, optimizer_workspace_bytes=rng.choice((0, 5, 500)), other_bytes=3)
    return draft.graph(
        num_forward, lambda value: 0 if tidy else hold[value], Hardware("test", link_bytes_per_s=link), **static
    )


def _backward_op(draft: _Draft, rng: random.Random, forward_op: int, gradients: list[int], tidy: bool) -> None:
    at = len(draft.ops)
    inputs = [*gradients[-1:], *(g for g in gradients if rng.random() < 0.1)]
    for index in draft.saves_of.get(forward_op, []):
        fate = "read" if tidy else rng.choice(("read",) * 8 + ("unread", "gone at once", "held on"))
        save = draft.saves[index]
        if fate in ("read", "held on"):
            inputs.append(save.value)
        released = at + {"read": 1, "unread": rng.randint(0, 2), "gone at once": 0, "held on": rng.randint(1, 4)}[fate]
        used = rng.choice((-1, at + 1)) if fate == "held on" else -1
        draft.saves[index] = replace(save, read=-1 if fate == "unread" else at, released=released, used=used)
    outputs = [draft.value(rng.randrange(1, 40), "activation", "dy", born=at) for _ in range(rng.choice((0, 1, 1, 2)))]
    gradients += outputs
    if rng.random() < 0.3:
        outputs.append(draft.value(rng.randrange(1, 9), "gradient", "dw", born=at))
    op = Op("backward", draft.ops[forward_op].call, rng.randrange(9) / 8, 0, tuple(inputs), tuple(outputs))
    saved = [draft.saves[index].value for index in draft.saves_of.get(forward_op, [])]
    draft.op(replace(op, workspace_bytes=rng.choice((0, 0, 8)), forward_op=forward_op), saved=saved)
