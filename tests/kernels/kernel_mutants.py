"""Faults for the shipped kernels, each of which the emulated tests must catch. Each replaces a text that stands exactly
once in its source file."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault in a shipped kernel, the build that must catch it, and the message that it must give."""

    file: str
    old: str
    new: str
    kind: str
    message: str
    instance: str = "step_fp64"  # the instance to compile with the fault
    runs: tuple[tuple[str, ...], ...] = ()  # arguments of the test program; empty: those of the instance

    @property
    def program(self) -> str:
        if self.instance == "layer_norm_step":
            return "emulation_layer_norm_test"
        persistent = self.instance.startswith(("persistent", "projected"))
        return "emulation_persistent_test" if persistent else "emulation_step_test"

    def arguments(self) -> list[list[str]]:
        """A list of arguments for each run; the fault is caught if one run gives the message."""
        races = ["races"] if self.kind == "thread" and self.program == "emulation_persistent_test" else []
        return [[*run, *races, "1"] for run in self.runs or RUNS[self.instance]]


_NOISY = (("quick", "lstm float64 T4 B3 H5 P0 D2 lengths resets to_initial noise"),)
_ON = ("registers", "four_warps", "streamed", "only_streamed")
RUNS = {
    "step_fp64": (("all", "lstm float64 T4 B3"), ("all", "lstm float64 T3 B17")),
    "block_bf16": (("all", "lstm bfloat16 T4 B3", "block"), ("all", "lstm bfloat16 T3 B17", "block")),
    "elementwise": (("all", "indrnn_tanh float64 T", "block"),),
    "rebuild": (("all", "lstm float64 T6"),),
    "layer_norm_step": (("quick",),),
    "persistent_bf16": tuple((device, "gru bfloat16 T3 B") for device in _ON),
    "persistent_fp32": tuple((device, "gru float32 T3 B") for device in _ON),
    "projected_bf16": tuple(
        (device, "lstm_projected bfloat16 T3 B") for device in ("registers", "shared", "partial_streamed")
    ),
}
_COPIED = (("all", "lstm bfloat16 T3 B17", "block"),)
_CLUSTER = (("cluster", "gru bfloat16 T3 B"),)
_TWO_PRODUCTS = (("cluster", "gru_reset_before bfloat16 T3 B"),)
_HELD = (("registers", "gru bfloat16 T3 B37 H128"),)
_HELD_BACKWARD = (("registers", "gru bfloat16 T3 B19 H128"),)
_FOUR_GATES = (("registers", "lstm bfloat16 T3 B"),)
_NOT_WHOLE = (("registers", "gru bfloat16 T3 B19 H192"),)
_IN_SEQUENCE = (("registers", "lstm bfloat16 T3 B20 H200"),)
_TIMEOUT = (("timeout", "shared", "gru bfloat16 T4 B37"),)
_BARRIER = "\n      block_sync();"
_LAST_SUM = "sums.value[m][row_tile][i];\n          }"
_VALID = "static_cast<int>(left)"
_BYTES = "std::max(stages, partial);"
_IN_RANGE = "if (b >= p.rows || j >= p.units) continue;"
_OVERRUN = "heap-buffer-overflow"
_SYNC = "\n    block_sync();"
_POINTWISE = "b, j, &state));\n      }\n    }"
_PARTIAL = "if (product) part.run(from, count_rows(), held, [] {});"
_BROADCAST = "operand.broadcast(part.phase, block * part.block_units(), end - row0, thread);"
_CLUSTER_WAIT = "if (exchanges) cluster_wait();"
_FOREVER = "a wait that can never end"
MUTANTS = {
    "stage written while it is read": Mutant(
        "step/kernel.cuh", "(1 - stage) * stage_bytes", "stage * stage_bytes", "plain", "FAIL"
    ),
    "copies not waited for": Mutant("step/kernel.cuh", "wait_copies<0>();", "", "plain", "FAIL"),
    "no barrier before the product": Mutant(
        "step/kernel.cuh", "wait_copies<0>();\n        block_sync();", "wait_copies<0>();", "thread", "data race"
    ),
    "no barrier after the row tables": Mutant(
        "step/kernel.cuh",
        "fill_table(thread, threads);" + _BARRIER,
        "fill_table(thread, threads);",
        "thread",
        "data race|SEGV",
    ),
    "no barrier after the partial sums": Mutant(
        "step/kernel.cuh", _LAST_SUM + _BARRIER, _LAST_SUM, "thread", "data race"
    ),
    "one row too many": Mutant("step/kernel.cuh", _IN_RANGE, _IN_RANGE.replace("b >=", "b >"), "address", _OVERRUN),
    "one piece of depth too many": Mutant(
        "step/kernel.cuh", _VALID + " : kPieceDepth;", _VALID + " + 1 : kPieceDepth;", "address", _OVERRUN
    ),
    "swizzle of seven": Mutant("tile.cuh", "(row & 7)", "(row % 7)", "plain", "FAIL"),
    "wrong accumulator row": Mutant(
        "step/kernel.cuh", "lane / 4 + i / 2 * 8,", "lane / 4 + i % 2 * 8,", "plain", "FAIL"
    ),
    "reset forgotten in backward": Mutant(
        "phases.cuh", "if (!after.cut) return gradient;", "return gradient;", "plain", "FAIL"
    ),
    "block: no barrier between steps": Mutant(
        "block/kernel.cuh",
        "warp_sync();\n      block_sync();\n    }",
        "warp_sync();\n    }",
        "thread",
        "data race",
        "block_bf16",
    ),
    "block: the operand that is read is overwritten": Mutant(
        "block/kernel.cuh",
        "operands + (1 - s % 2) * operand_bytes",
        "operands + s % 2 * operand_bytes",
        "plain",
        "FAIL",
        "block_bf16",
    ),
    "block: partial sums read too early": Mutant(
        "block/kernel.cuh",
        "kWarpUnits, lane);\n      warp_sync();",
        "kWarpUnits, lane);",
        "thread",
        "data race",
        "block_bf16",
    ),
    "block: one row too many": Mutant(
        "block/kernel.cuh", "if (b >= step.rows || unit", "if (b > step.rows || unit", "address", _OVERRUN, "block_bf16"
    ),
    "persistent: flags not waited for": Mutant(
        "persistent/kernel.cuh", "if (done > 0) {", "if (false) {", "thread", "data race", "persistent_bf16"
    ),
    "persistent: a flag too much is waited for": Mutant(
        "persistent/kernel.cuh",
        "(done - 1) * p.bands + c + 1",
        "done * p.bands + c + 1",
        "plain",
        _FOREVER,
        "persistent_bf16",
    ),
    "persistent: bands share a flag": Mutant(
        "persistent/kernel.cuh",
        "(done - 1) * p.bands + c + 1",
        "(done - 1) * p.bands + 1",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: nothing is published": Mutant(
        "persistent/kernel.cuh",
        "if (thread == 0 && !p.cluster && !aborted)\n            store_release",
        "if (false) store_release",
        "plain",
        _FOREVER,
        "persistent_bf16",
    ),
    "persistent: rows whose last slice is not whole are copied as if it were": Mutant(
        "persistent/launch.cpp",
        "product.depth[segment] * l.element % kPersistentSlice != 0",
        "false",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: slices beyond the last are copied": Mutant(
        "persistent/launch.cpp",
        "bool whole = phase.slices % phase.depth_warps == 0 && phase.first_slices % phase.depth_warps == 0;",
        "bool whole = true;",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_NOT_WHOLE,
    ),
    "persistent: another segment's rows are copied": Mutant(
        "persistent/product.cuh",
        "&table(segment, first_row());\n    each_row",
        "&table(0, first_row());\n    each_row",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_HELD_BACKWARD,
    ),
    "persistent: rows of zeros copied as others": Mutant(
        "persistent/product.cuh",
        "row ? kPieceBytes : 0",
        "kPieceBytes",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=(("registers", "lstm bfloat16 T3 B37 H128"),),
    ),
    "persistent: rows beyond a tile not multiplied": Mutant(
        "persistent/product.cuh",
        "if (rows <= kTileRows) run_tiles",
        "if (rows <= kBand) run_tiles",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_HELD,
    ),
    "persistent: weights in registers taken for another round's": Mutant(
        "persistent/product.cuh", "if (round < kMiddle)", "if (round <= kMiddle)", "plain", "FAIL", "persistent_bf16"
    ),
    "persistent: the step's own rows taken for the pending ones": Mutant(
        "persistent/rows.cuh", "&from->here", "&to->here", "plain", "FAIL", "persistent_bf16"
    ),
    "persistent: published before all have written": Mutant(
        "persistent/kernel.cuh", _POINTWISE + _SYNC, _POINTWISE, "thread", "data race", "persistent_bf16"
    ),
    "persistent: operand loaded before the flags are seen": Mutant(
        "persistent/kernel.cuh", "aborted = block_sync_any(!all);", "", "thread", "data race|SEGV", "persistent_bf16"
    ),
    "persistent: no barrier before the partial sums are added": Mutant(
        "persistent/kernel.cuh", _PARTIAL + _SYNC, _PARTIAL, "thread", "data race", "persistent_bf16"
    ),
    "persistent: no barrier in a round": Mutant(
        "persistent/product.cuh",
        "if (phase.unit_warps > 1) block_sync();",
        "if (phase.unit_warps > 1) warp_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: lanes do not wait for each other in a round": Mutant(
        "persistent/product.cuh",
        "block_sync();\n    else warp_sync();",
        "block_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: copies not waited for": Mutant(
        "persistent/product.cuh", "wait_copies<kPersistentStages - 2>();", "", "plain", "FAIL", "persistent_bf16"
    ),
    "persistent: a stage that is read is filled": Mutant(
        "persistent/product.cuh",
        "ring : round % kPersistentStages",
        "ring : round % (kPersistentStages - 1)",
        "plain",
        "FAIL",
        "persistent_bf16",
        _FOUR_GATES,
    ),
    "persistent: a stage that is read is filled, places that move on": Mutant(
        "persistent/product.cuh",
        "stage == (kPersistentStages - 1)",
        "stage == (kPersistentStages - 2)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: rows of the first segment kept for the second": Mutant(
        "persistent/product.cuh",
        "kept.segment == 0 && kept.slices <= 0",
        "kept.segment == 0 && kept.slices < 0",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: addresses that are read are overwritten": Mutant(
        "persistent/kernel.cuh",
        "direction, current + s % 2 * 2",
        "direction, current + (1 - s % 2) * 2",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: one row too many": Mutant(
        "persistent/kernel.cuh",
        "count_rows() * units;",
        "(count_rows() + 1) * units;",
        "address",
        _OVERRUN,
        "persistent_bf16",
    ),
    "weights are followed by NaN": Mutant(
        "transpose.cuh", ": T(0);", ": T(-1);", "plain", "FAIL", "transpose", _COPIED
    ),
    "weights are copied by columns": Mutant(
        "transpose.cuh", "p.transposes ? x * kPitch + y", "true ? x * kPitch + y", "plain", "FAIL", "transpose", _COPIED
    ),
    "persistent: slices of a streamed round mistaken": Mutant(
        "persistent/product.cuh",
        "slice_of(last ? round + 1 : round)",
        "slice_of(round)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: a warp's tiles of units mistaken": Mutant(
        "persistent/product.cuh",
        "* high + (kUnitTiles ? kUnits * m : 0)",
        "* high + (kUnitTiles ? kUnits * (1 - m) : 0)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "FMA: lanes that share a unit exchange the wrong sums": Mutant(
        "persistent/product.cuh", "lane ^ half", "lane ^ (half / 2)", "plain", "FAIL", "persistent_fp32"
    ),
    "FMA: a lane's units mistaken": Mutant(
        "persistent/product.cuh",
        "sums[m][tile][row + kTileRows * high]",
        "sums[m][tile][row + kTileRows * (kHigh - 1 - high)]",
        "plain",
        "FAIL",
        "persistent_fp32",
    ),
    "FMA: rows of a tile that is not full forgotten": Mutant(
        "persistent/product.cuh",
        "if (tile > 0 && kTileRows * tile >= rows) break;",
        "if (kTileRows * (tile + 1) > rows) break;",
        "plain",
        "FAIL",
        "persistent_fp32",
    ),
    "FMA: weights that are read ahead are those of the same part of a slice": Mutant(
        "persistent/product.cuh", "more ? half : (half + 1) % kHalves", "half", "plain", "FAIL", "persistent_fp32"
    ),
    "FMA: no barrier before the partial sums are added": Mutant(
        "persistent/kernel.cuh", _PARTIAL + _SYNC, _PARTIAL, "thread", "data race", "persistent_fp32"
    ),
    "cluster: no barrier between steps": Mutant(
        "persistent/kernel.cuh", _CLUSTER_WAIT, "", "thread", "data race", "persistent_bf16", runs=_CLUSTER
    ),
    "cluster: the operand that is read is overwritten": Mutant(
        "persistent/kernel.cuh",
        "const Operand operand{p, 1 - s % 2};",
        "const Operand operand{p, s % 2};",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_CLUSTER,
    ),
    "cluster: nothing is broadcast": Mutant(
        "persistent/cluster.cuh", "away < blocks", "away < 1", "plain", "FAIL", "persistent_bf16", runs=_CLUSTER
    ),
    "cluster: pieces that two blocks share": Mutant(
        "persistent/cluster.cuh",
        "p.step.hidden % kPieceDepth != 0",
        "false",
        "address",
        "misaligned address",
        "persistent_bf16",
        runs=_CLUSTER,
    ),
    "cluster: broadcast before all have written": Mutant(
        "persistent/kernel.cuh", _POINTWISE + _SYNC, _POINTWISE, "thread", "data race", "persistent_bf16", runs=_CLUSTER
    ),
    "cluster, two products: no barrier between them": Mutant(
        "persistent/kernel.cuh",
        _CLUSTER_WAIT,
        "if (exchanges && index > 0) cluster_wait();",
        "thread",
        "data race",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: no barrier between steps": Mutant(
        "persistent/kernel.cuh",
        _CLUSTER_WAIT,
        "if (exchanges && index == 0) cluster_wait();",
        "thread",
        "data race",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: the first's operand read twice": Mutant(
        "persistent/kernel.cuh",
        "p.operand_at[index]",
        "p.operand_at[0]",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: the second's operand in the first's place": Mutant(
        "persistent/launch.cpp",
        "partition.operand_at[number == second]",
        "partition.operand_at[0]",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: the second's operand is not broadcast": Mutant(
        "persistent/kernel.cuh",
        _BROADCAST,
        "if (index > 0) " + _BROADCAST,
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: the step's end is not broadcast": Mutant(
        "persistent/kernel.cuh",
        _BROADCAST,
        "if (index == 0) " + _BROADCAST,
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "cluster, two products: one place for what two phases write": Mutant(
        "persistent/partition.h",
        "p.phases == 1 || request.backward ? first_bytes : 0",
        "p.phases == 1 ? first_bytes : 0",
        "thread",
        "data race",
        "persistent_bf16",
        runs=_TWO_PRODUCTS,
    ),
    "rebuilding: the state before is that of the wrong step": Mutant(
        "persistent/rebuild.cuh",
        "before = d.reverse ? t + 1 : t - 1;",
        "before = d.reverse ? t - 1 : t + 1;",
        "plain",
        "FAIL",
        "rebuild",
    ),
    "rebuilding: a row beyond the range": Mutant(
        "persistent/rebuild.cuh", "if (r >= p.rows) return;", "", "address", _OVERRUN, "rebuild"
    ),
    "timeout: sums that are not there are zero": Mutant(
        "persistent/kernel.cuh",
        "sum_unless(aborted)",
        "0",
        "plain",
        "neither NaN nor right",
        "persistent_bf16",
        runs=_TIMEOUT,
    ),
    "timeout: the status stays empty": Mutant(
        "persistent/wait.cuh",
        "store_system(p.status,",
        "(void)(",
        "plain",
        "no status",
        "persistent_bf16",
        runs=_TIMEOUT,
    ),
    "timeout: waits without end": Mutant(
        "persistent/wait.cuh",
        "wanted; }, p.timeout_ns,",
        "wanted; }, 0,",
        "plain",
        _FOREVER,
        "persistent_bf16",
        runs=_TIMEOUT,
    ),
    "in sequence: both launches are the first direction's": Mutant(
        "persistent/launch.cpp",
        "p.direction[launch.first + i]",
        "p.direction[i]",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_IN_SEQUENCE,
    ),
    "in sequence: both backward launches write to the first direction": Mutant(
        "persistent/launch.cpp",
        "backward_launch(l, args, first,",
        "backward_launch(l, args, 0,",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_IN_SEQUENCE,
    ),
    "in sequence: the status names the wrong direction": Mutant(
        "persistent/wait.cuh",
        "p.first_direction + block_z()",
        "block_z()",
        "plain",
        "the status names",
        "persistent_bf16",
        runs=(("timeout", "registers", "lstm bfloat16 T4 B20 H200"),),
    ),
    "projected: partial sums added before all are there": Mutant(
        "persistent/projected.cuh",
        "of.wait(of.own_done(s, band), shared, kShared);",
        "block_sync();",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: operand gathered before all is there": Mutant(
        "persistent/projected.cuh",
        "if (s > 0) return wait(share_done(",
        "if (false) return wait(share_done(",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: first operand of backward not waited for": Mutant(
        "persistent/projected.cuh",
        "if (kBackward) return wait(c + 1, d, kOwn);",
        "",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: partial sums overwritten while others read them": Mutant(
        "persistent/projected.cuh",
        "return wait(share_done(s, {c - p.slots, band.slot}), d, kOwn);",
        "return wait(s > 0 ? share_done(s - 1, band) : kBackward ? c + 1 : 0, d, kOwn);",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: a flag too much is waited for": Mutant(
        "persistent/projected.cuh",
        "of.wait(of.own_done(s, band), shared, kShared);",
        "of.wait(of.own_done(s, band) + 1, shared, kShared);",
        "plain",
        _FOREVER,
        "projected_bf16",
    ),
    "projected: nothing is published": Mutant(
        "persistent/projected.cuh",
        "if (thread_index() == 0 && !aborted) store_release",
        "if (false) store_release",
        "plain",
        _FOREVER,
        "projected_bf16",
    ),
    "projected: published before all have written": Mutant(
        "persistent/projected.cuh",
        "weights.partial);\n        block_sync();\n      }",
        "weights.partial);\n      }",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: own operand read before it is written": Mutant(
        "persistent/projected.cuh",
        "block_sync();\n      if ((!kBackward || s < p.last) && !aborted) {",
        "if ((!kBackward || s < p.last) && !aborted) {",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: no barrier before the warps' sums are added": Mutant(
        "persistent/projected.cuh",
        "block_sync();\n        for (int i = thread; i < kPersistentShare",
        "for (int i = thread; i < kPersistentShare",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: own operand not cleared": Mutant(
        "persistent/projected.cuh", "partial.clear_operand(thread);", "", "plain", "FAIL", "projected_bf16"
    ),
    "projected: bands share a slot": Mutant(
        "persistent/projected.cuh", "static_cast<int64_t>(band.slot)", "int64_t{0}", "plain", "FAIL", "projected_bf16"
    ),
    "projected: a tile beyond the results is stored": Mutant(
        "persistent/projected.cuh",
        "item.result0 < phase.units ? rows : 0",
        "rows",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "projected: a block's sums taken for another's": Mutant(
        "persistent/projected.cuh",
        "left > 0; --left, read += step)",
        "left > 0; --left)",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "projected: one element too many": Mutant(
        "persistent/projected.cuh", "first + i < to;", "first + i <= to;", "plain", "FAIL", "projected_bf16"
    ),
    "projected: addresses that are read are overwritten": Mutant(
        "persistent/projected.cuh", "direction, next, d, s", "direction, d, d, s", "plain", "FAIL", "projected_bf16"
    ),
    "projected: items of the streamed weights mistaken": Mutant(
        "persistent/projected.cuh",
        "load_item<true>(next, after(item), 0);\n        warp_sync",
        "load_item<true>(next, item, 0);\n        warp_sync",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "projected: resident items mistaken": Mutant(
        "persistent/projected.cuh",
        "load_item<false>(fragment, item_of(phase.register_rounds + i),",
        "load_item<false>(fragment, item_of(i),",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "elementwise: the last row left out": Mutant(
        "block/elementwise.cuh", "if (b < step.rows)", "if (b + 1 < step.rows)", "plain", "FAIL", "elementwise"
    ),
    "elementwise: the weight's gradient without the old state": Mutant(
        "../cells/indrnn.h", "= d_sum * u.h_prev;", "= d_sum;", "plain", "FAIL", "elementwise"
    ),
    "sLSTM: the normaliser's gradient not scaled": Mutant(
        "../cells/slstm.h", "= d_n * gate.f;", "= d_n;", "plain", "FAIL", runs=(("all", "slstm float64 T"),)
    ),
    "peephole: the output gate's left out": Mutant(
        "../cells/lstm.h",
        "d_c = d_c + u.d_input[3] * u.unit_weight[2];",
        "d_c = d_c;",
        "plain",
        "FAIL",
        runs=(("all", "lstm_peephole float64 T"),),
    ),
    "noise: the candidate draws what the state draws": Mutant(
        "../cells/noise.h", "draw(kOfCandidate,", "draw(kOfH,", "plain", "FAIL", runs=_NOISY
    ),
    "noise: cell states draw what h draws": Mutant(
        "../cells/noise.h", "draw(kOfCells,", "draw(kOfH,", "plain", "FAIL", runs=_NOISY
    ),
    "noise: a cell that was kept is taken for the new one": Mutant(
        "../cells/noise.h",
        "zoneout.words.if_below(zoneout.below, u.c[i], stored[i]);",
        "stored[i];",
        "plain",
        "FAIL",
        runs=_NOISY,
    ),
    "noise: a cell that was kept passes no gradient": Mutant(
        "../cells/noise.h", "u.d_c[i] = u.d_c[i] + kept_c[i];", "u.d_c[i] = u.d_c[i];", "plain", "FAIL", runs=_NOISY
    ),
    "noise: all rows draw the same": Mutant(
        "phases.cuh",
        "static_cast<uint32_t>(b), static_cast<uint32_t>(d.here.step)",
        "0u, static_cast<uint32_t>(d.here.step)",
        "plain",
        "FAIL",
        runs=_NOISY,
    ),
    "noise: neighbouring units draw the same": Mutant(
        "device.cuh", "word = place.unit % 2 ? odd : even;", "word = even;", "plain", "FAIL", runs=_NOISY
    ),
    "noise: both launches draw the first direction's": Mutant(
        "phases.cuh",
        "p.noise.first_direction + block_z()",
        "block_z()",
        "plain",
        "FAIL",
        "persistent_bf16",
        runs=_IN_SEQUENCE,
    ),
    "shared memory too small": Mutant(
        "step/launch.cpp", "return table + " + _BYTES, "return " + _BYTES, "plain", r"shared memory \["
    ),
    "layer norm: a mean misses lanes": Mutant(
        "layer_norm.cuh", "int distance = 16;", "int distance = 8;", "plain", "FAIL", "layer_norm_step"
    ),
    "layer norm: a mean misses the last warp": Mutant(
        "layer_norm.cuh", "int i = 0; i < warps;", "int i = 0; i + 1 < warps;", "plain", "FAIL", "layer_norm_step"
    ),
    "layer norm: a block takes only as many units as it has threads": Mutant(
        "layer_norm.cuh",
        "i < count; i += block_threads()) function",
        "i < count && i < block_threads(); i += block_threads()) function",
        "plain",
        "FAIL",
        "layer_norm_step",
    ),
    "layer norm: gradients of gains miss rows": Mutant(
        "layer_norm.cuh", "row += kGroups", "row += args.rows", "plain", "FAIL", "layer_norm_step"
    ),
    "layer norm: gradients of gains miss a warp": Mutant(
        "layer_norm.cuh", "other < kMaxThreads;", "other + kUnits < kMaxThreads;", "plain", "FAIL", "layer_norm_step"
    ),
    "layer norm: too little shared memory": Mutant(
        "layer_norm.cuh", "return 2 * (threads / 32)", "return (threads / 32)", "address", _OVERRUN, "layer_norm_step"
    ),
    "layer norm: gradients of units that are not there": Mutant(
        "layer_norm.cuh", "    if (unit < args.hidden)\n", "", "address", _OVERRUN, "layer_norm_step"
    ),
    "layer norm: sums read before they are there": Mutant(
        "layer_norm.cuh", "block_sync();\n    sum = {0, 0};", "sum = {0, 0};", "thread", "data race", "layer_norm_step"
    ),
    "layer norm: one set of sums": Mutant(
        "layer_norm.cuh", "set = 1 - set;", "", "thread", "data race", "layer_norm_step"
    ),
    "layer norm: rows of sums read before they are there": Mutant(
        "layer_norm.cuh", "block_sync();\n    if (group", "if (group", "thread", "data race", "layer_norm_step"
    ),
    **{
        f"layer norm: no barrier after {loop}": Mutant(
            "../layer_norm_rows.h", f"walk.sync();  // {loop}\n", "\n", "thread", "data race", "layer_norm_step"
        )
        for loop in ("N(product) of the LSTM", "d_input of the LSTM", "d_input of the GRU")
    },
    "layer norm: all threads keep the moments": Mutant(
        "../layer_norm_rows.h", "if (walk.leads()) ", "", "thread", "data race", "layer_norm_step"
    ),
}
