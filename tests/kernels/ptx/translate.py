"""Translates nvcc's PTX to C++: one function per kernel, which runtime.h runs on a fiber for each CUDA thread.

Registers become local variables, and branches gotos. An instruction that involves only its own thread becomes an
expression; one that touches memory or other threads becomes a call of runtime.h. An instruction, operand or directive
that is not understood is an error.
Section numbers are those of "Parallel Thread Execution ISA", version 9.0.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field

C_TYPE = {"pred": "bool", "f32": "float", "f64": "double", "bf16": "uint16_t", "f16": "uint16_t", "tf32": "uint32_t"}
for _n in (8, 16, 32, 64):
    C_TYPE |= {f"u{_n}": f"uint{_n}_t", f"b{_n}": f"uint{_n}_t", f"s{_n}": f"int{_n}_t"}
POISON = {"bool": "true", "uint16_t": "0xDEAD", "uint32_t": "0xDEADBEEF", "uint64_t": "0xDEADBEEFDEADBEEF",
          "float": "NAN", "double": "NAN"}  # fmt: skip
SPECIAL = {  # 10, "Special Registers"
    "%tid.x": "c.tid", "%ntid.x": "c.ntid", "%ctaid.x": "c.ctaid.x", "%ctaid.y": "c.ctaid.y", "%ctaid.z": "c.ctaid.z",
    "%nctaid.x": "c.nctaid.x", "%globaltimer": "emulation::nanoseconds()",
    "%cluster_ctarank": "emulation::cluster_rank()", "%cluster_nctarank": "emulation::cluster_size()",
}  # fmt: skip

# C++ expressions of instructions on operands a, b, c, d. Here integers that wrap around, read as unsigned whatever the
# PTX type; below all others, read as the type T (W: the type of twice its width).
WRAPPING = {
    "add": "{a} + {b}", "sub": "{a} - {b}", "mul.lo": "{a} * {b}", "mad.lo": "{a} * {b} + {c}", "neg": "0 - {a}",
    "and": "{a} & {b}", "or": "{a} | {b}", "xor": "{a} ^ {b}", "not": "~{a}",
}  # fmt: skip
OF_INTEGERS = {
    "min": "std::min<T>({a}, {b})", "max": "std::max<T>({a}, {b})", "mul.hi": "T((W({a}) * W({b})) >> (8 * sizeof(T)))",
    "mul.wide": "W({a}) * W({b})", "div": "c.divide<T>({a}, {b}, {line})", "rem": "c.remainder<T>({a}, {b}, {line})",
    "bfi": "insert_bits<T>({a}, {b}, {c}, {d})", "prmt": "permute_bytes({a}, {b}, {c})",
}  # fmt: skip
OF_FLOATS = {
    "add": "{a} + {b}", "add.rn": "{a} + {b}", "add.rz": "add_toward_zero({a}, {b})", "div.rn": "{a} / {b}",
    "sub": "{a} - {b}", "mul": "{a} * {b}", "neg": "-{a}",
    "abs": "std::fabs({a})",
    "fma.rn": "std::fma({a}, {b}, {c})", "fma.rm": "fma_down({a}, {b}, {c})", "copysign": "std::copysign({b}, {a})",
    "min": "std::fmin({a}, {b})", "max": "std::fmax({a}, {b})", "rcp.rn": "1 / {a}",
    "sqrt.rn": "std::sqrt({a})",
    "ex2.approx.ftz": "ex2_approx_ftz({a})", "rcp.approx.ftz": "rcp_approx_ftz({a})",
}  # fmt: skip
OF_PREDICATES = {"and": "{a} && {b}", "or": "{a} || {b}", "xor": "{a} != {b}", "not": "!{a}"}
OUTSIDE = re.compile(r"\.(version|target|address_size|file|section|b8|b16|b32|b64)\b|[{}]|[$\w]+:")
# 9.7.3, 9.7.7.6: with a NaN operand, ordered comparisons are false, and unordered ones (with a final u) true.
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
CONVERT = {  # 9.7.9.21, "cvt": all but integers to integers
    "cvt.f32.f16": "fp16_to_float({a})", "cvt.f64.f32": "double({a})", "cvt.rn.bf16.f32": "to_bf16({a})",
    "cvt.rz.bf16.f32": "to_bf16_toward_zero({a})", "cvt.rn.f16.f32": "to_fp16({a})", "cvt.rna.tf32.f32": "to_tf32({a})",
    "cvt.rn.f32.f64": "float({a})", "cvt.sat.f32.f32": "saturate({a})", "cvt.rni.f32.f32": "std::nearbyint({a})",
    "cvt.rni.f64.f64": "std::nearbyint({a})", "cvt.rn.f32.s32": "float({a})",
    "cvt.rn.f32.s64": "float({a})", "cvt.rn.f64.s64": "double({a})",
}  # fmt: skip
MMA = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "mma_bf16",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "mma_fp16",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "mma_tf32",
}


class NotUnderstood(Exception):
    """PTX that this translator does not know."""


def are_integers(*c_types: str) -> bool:
    return {"float", "double", "bool"}.isdisjoint(c_types)


def _bits(c_type: str) -> int:
    return int(re.search(r"\d+", c_type)[0])


def split(text: str) -> list[str]:
    """Splits at the commas outside braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


@dataclass
class Instruction:
    """An instruction of a kernel, for counting: its basic block, opcode and source places, innermost first."""

    block: int
    opcode: str
    places: tuple[str, ...]


@dataclass
class Kernel:
    """A kernel's C++ function while it is being translated, and afterwards the facts about it."""

    name: str
    file: str
    shared: set[str]
    counting: bool
    max_threads: int = 0
    param_bytes: int = 0
    params: dict[str, int] = field(default_factory=dict)
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])
    types: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    sources: list[tuple[int, str]] = field(default_factory=list)
    places: tuple[str, ...] = ("?",)
    instructions: list[Instruction] = field(default_factory=list)
    blocks: int = 0
    _block_ended: bool = True

    # ---- registers and operands
    def declare(self, kind: str, names: str) -> None:
        for name in split(names):
            found = re.fullmatch(r"%(\w+)<(\d+)>", name)
            for one in [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name[1:]]:
                variable = one if len(self.scopes) == 1 else f"{one}_{len(self.types)}"
                self.scopes[-1]["%" + one] = variable
                self.types[variable] = C_TYPE["b" + kind[1:] if kind[0] in "us" else kind]

    def register(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise NotUnderstood(f"register {name}")

    def value(self, operand: str, kind: str) -> str:
        """The operand read as a PTX type."""
        wanted = C_TYPE[kind]
        if operand in SPECIAL:
            return f"{wanted}({SPECIAL[operand]})"
        if operand.startswith("%"):
            name = self.register(operand)
            have = self.types[name]
            if have == wanted:
                return name
            return f"{wanted}({name})" if are_integers(have, wanted) else f"as<{wanted}>({name})"
        if operand.startswith(("0f", "0d")):  # 4.5.2, "Floating-Point Constants"
            kept = "float" if operand[1] == "f" else "double"
            number = f"{kept}_of(0x{operand[2:]})"
            return number if wanted == kept else f"as<{wanted}>({number})"
        if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+U?", operand) and wanted not in ("float", "double"):
            number = int(operand.rstrip("U"), 0)
            return f"{wanted}({number})" if -(2**63) < number < 2**63 else f"{wanted}({number}u)"
        if operand in self.params:
            return f"c.param_address({self.params[operand]})"
        if operand in self.shared:
            return f"{wanted}(kSharedBase)"
        raise NotUnderstood(f"operand {operand} as {kind}")

    def address(self, operand: str) -> str:
        found = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand)
        if not found:
            raise NotUnderstood(f"address {operand}")
        return self.value(found[1], "u64") + (f" + uint64_t({found[2]})" if found[2] else "")

    def assign(self, to: str, code: str, c_type: str) -> str:
        """Assigns a result of the C type to a register: its low bits, or sign-extended if it is narrower."""
        if to == "_":
            return f"static_cast<void>({code});"
        name = self.register(to)
        have = self.types[name]
        if have == c_type:
            return f"{name} = {code};"
        if are_integers(have, c_type):
            extended = _bits(have) > _bits(c_type)
            return f"{name} = {have}({c_type}({code}));" if extended else f"{name} = {have}({code});"
        return f"{name} = as<{have}>({c_type}({code}));"

    # ---- instructions
    def here(self, line: int) -> str:
        return f'"{self.places[0]}@{self.file}", {line}'

    def instruction(self, text: str, line: int) -> None:
        found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if not found:
            raise NotUnderstood(text)
        negated, guard, opcode, operands = found.groups()
        if self._block_ended:
            if self.counting:
                self.body.append(f"  ++c.counts[{self.blocks}];")
            self.blocks += 1
        self._block_ended = opcode.startswith("bra") or opcode == "ret"
        self.instructions.append(Instruction(self.blocks - 1, opcode, self.places))
        code = self.code(opcode, split(operands), line)
        condition = f"if ({negated}{self.value(guard, 'pred')}) " if guard else ""
        self.body.append(f"  {condition}{{ {code} }}")

    def code(self, opcode: str, operands: list[str], line: int) -> str:
        head, _, kind = opcode.rpartition(".")
        if opcode in ("bra", "bra.uni"):
            return f"goto {operands[0].replace('$', 'L')};"
        if opcode == "ret":
            return "return;"
        if head == "mov":
            return self.move(kind, operands)
        if opcode.startswith(("ld.", "st.")):
            return self.memory(opcode.split("."), operands, line)
        if opcode.startswith(("setp.", "selp.", "shl.", "shr.", "cvt.", "cvta.")):
            return getattr(self, opcode.split(".")[0])(opcode, head, kind, operands, line)
        if opcode in MMA:
            return self.mma(opcode, operands, line)
        for table, kinds in ((OF_PREDICATES, "p"), (OF_FLOATS, "f"), (WRAPPING, "usb"), (OF_INTEGERS, "usb")):
            if kind in C_TYPE and kind[0] in kinds and head in table:
                return self.arithmetic(table, head, kind, operands, line)
        return self.together(opcode, operands, line)

    def arithmetic(self, table: dict[str, str], head: str, kind: str, operands: list[str], line: int) -> str:
        result = kind = "u" + kind[1:] if table is WRAPPING else kind
        values = {letter: self.value(operand, "b32" if head == "bfi" and letter in "cd" else kind)
                  for letter, operand in zip("abcd", operands[1:], strict=False)}  # fmt: skip
        code = table[head].format(**values, line=line)
        if table is OF_INTEGERS:
            wide = kind[0] + str(2 * int(kind[1:]))
            code = re.sub(r"\b[TW]\b", lambda found: C_TYPE[kind if found[0] == "T" else wide], code)
            result = wide if head == "mul.wide" else kind
        return self.assign(operands[0], code, C_TYPE[result])

    def move(self, kind: str, operands: list[str]) -> str:
        to, source = operands
        for packed, other in ((to, source), (source, to)):
            if packed.startswith("{"):  # 9.7.9.5, "mov": pack and unpack, low elements first
                parts = split(packed[1:-1])
                bits = int(kind[1:]) // len(parts)
                low, whole = C_TYPE[f"b{bits}"], C_TYPE[kind]
                if packed is to:
                    taken = [f"{low}({self.value(other, kind)} >> {bits * i})" for i in range(len(parts))]
                    return " ".join(self.assign(part, code, low) for part, code in zip(parts, taken, strict=True))
                given = [f"{whole}({self.value(part, f'b{bits}')}) << {bits * i}" for i, part in enumerate(parts)]
                return self.assign(other, " | ".join(given), whole)
        return self.assign(to, self.value(source, kind), C_TYPE[kind])

    def setp(self, opcode: str, head: str, kind: str, operands: list[str], line: int) -> str:
        relation = head.removeprefix("setp.")
        a, b = (self.value(operand, kind) for operand in operands[1:])
        if kind in ("f32", "f64"):
            unordered = len(relation) == 3 and relation.endswith("u")
            sign = COMPARE.get(relation[:2] if unordered else relation)
            any_nan = f"(std::isnan({a}) || std::isnan({b}))"
            code = f"{any_nan} || {a} {sign} {b}" if unordered else f"!{any_nan} && {a} {sign} {b}"
        else:
            sign = COMPARE.get(relation)
            code = f"{a} {sign} {b}"
        if sign is None:
            raise NotUnderstood(opcode)
        return self.assign(operands[0], code, "bool")

    def selp(self, opcode: str, head: str, kind: str, operands: list[str], line: int) -> str:
        a, b = (self.value(operand, kind) for operand in operands[1:3])
        return self.assign(operands[0], f"{self.value(operands[3], 'pred')} ? {a} : {b}", C_TYPE[kind])

    def shl(self, opcode: str, head: str, kind: str, operands: list[str], line: int) -> str:
        if "." in head:
            raise NotUnderstood(opcode)
        call = f"{head}<{C_TYPE[kind]}>({self.value(operands[1], kind)}, {self.value(operands[2], 'u32')})"
        return self.assign(operands[0], call, C_TYPE[kind])

    shr = shl

    def cvt(self, opcode: str, head: str, kind: str, operands: list[str], line: int) -> str:
        to = head.rpartition(".")[2]
        a = self.value(operands[1], "b16" if kind == "f16" else kind)
        if opcode in CONVERT:
            return self.assign(operands[0], CONVERT[opcode].format(a=a), C_TYPE[to])
        if opcode == f"cvt.{to}.{kind}" and to[0] in "us" and kind[0] in "us":
            return self.assign(operands[0], f"{C_TYPE[to]}({a})", C_TYPE[to])
        raise NotUnderstood(opcode)

    def cvta(self, opcode: str, head: str, kind: str, operands: list[str], line: int) -> str:
        calls = {"cvta.to.global.u64": "{}", "cvta.shared.u64": "c.shared_to_generic({})",
                 "cvta.to.shared.u64": "c.generic_to_shared({})"}  # fmt: skip
        if opcode not in calls:
            raise NotUnderstood(opcode)
        return self.assign(operands[0], calls[opcode].format(self.value(operands[1], "u64")), "uint64_t")

    def memory(self, words: list[str], operands: list[str], line: int) -> str:
        """9.7.9.8, "ld", and 9.7.9.12, "st"."""
        head, kind = words[0], words[-1]
        order, scope, space, count = "", "", "generic", 1
        for word in words[1:-1]:
            if word in ("global", "shared", "param"):
                space = word
            elif word in ("v2", "v4"):
                count = int(word[1])
            elif word in ("acquire", "release", "relaxed"):
                order = word
            elif word in ("gpu", "sys"):
                scope = word
            elif word == "nc" and (head, space) == ("ld", "global"):
                pass
            else:
                raise NotUnderstood(".".join(words))
        c_type = C_TYPE[kind]
        place, data = (operands[1], operands[0]) if head == "ld" else operands
        address = self.address(place)
        if order:
            if space != "global" or count != 1 or not scope:
                raise NotUnderstood(".".join(words))
            of = f"<{c_type}, __ATOMIC_{order.upper()}>"
            if head == "ld":
                return self.assign(data, f"c.load_atomic{of}({address}, {self.here(line)})", c_type)
            return f"c.store_atomic{of}({address}, {self.value(data, kind)}, {str(scope == 'gpu').lower()}, {line});"
        parts = split(data[1:-1]) if data.startswith("{") else [data]
        if len(parts) != count or (head == "st" and space == "param"):
            raise NotUnderstood(f"{'.'.join(words)} {operands}")
        of = c_type if count == 1 else f"{c_type}, {count}"
        call = f"c.{'load' if head == 'ld' else 'store'}_{space}<{of}>({address}, "
        if head == "ld" and count == 1:
            return self.assign(data, f"{call}{line})", c_type)
        if head == "ld":
            loaded = f"const auto w = {call}{line}); "
            return loaded + " ".join(self.assign(part, f"w[{i}]", c_type) for i, part in enumerate(parts))
        values = ", ".join(self.value(part, kind) for part in parts)
        return f"{call}{f'{{{values}}}' if count > 1 else values}, {line});"

    def mma(self, opcode: str, operands: list[str], line: int) -> str:
        d, a, b, c = (split(operand[1:-1]) for operand in operands)
        lists = [", ".join(self.value(r, kind) for r in part) for part, kind in ((c, "f32"), (a, "b32"), (b, "b32"))]
        code = f"Mma m{{{{{lists[0]}}}, {{{lists[1]}}}, {{{lists[2]}}}}}; c.mma({MMA[opcode]}, m, {self.here(line)}); "
        return code + " ".join(self.assign(r, f"m.d[{i}]", "float") for i, r in enumerate(d))

    def together(self, opcode: str, operands: list[str], line: int) -> str:
        here = self.here(line)
        if opcode == "bar.sync" and operands == ["0"]:
            return f"c.barrier({here});"
        if opcode == "bar.red.or.pred" and operands[1] == "0":
            return self.assign(operands[0], f"c.barrier_or({self.value(operands[2], 'pred')}, {here})", "bool")
        if opcode == "bar.warp.sync":
            return f"c.warp_sync({self.value(operands[0], 'u32')}, {here});"
        if opcode == "barrier.cluster.arrive.release":
            return f"c.cluster_arrive({line});"
        if opcode == "barrier.cluster.wait.acquire":
            return f"c.cluster_wait({here});"
        if opcode == "shfl.sync.idx.b32":
            to, *in_range = operands[0].split("|")
            values = ", ".join(self.value(operand, "b32") for operand in operands[1:])
            code = f"const Shuffle s = c.shuffle({values}, {here}); {self.assign(to, 's.result', 'uint32_t')}"
            return code + "".join(self.assign(p, "s.in_range", "bool") for p in in_range)
        if opcode == "ldmatrix.sync.aligned.m8n8.x4.shared.b16":
            code = f"const auto w = c.load_matrix({self.address(operands[1])}, {here}); "
            results = enumerate(split(operands[0][1:-1]))
            return code + " ".join(self.assign(r, f"w[{i}]", "uint32_t") for i, r in results)
        if opcode == "cp.async.cg.shared.global" and operands[2] == "16":
            valid = self.value(operands[3], "u32") if len(operands) > 3 else "16"
            return f"c.copy_async({self.address(operands[0])}, {self.address(operands[1])}, {valid}, {here});"
        if opcode == "cp.async.commit_group":
            return "emulation::commit_copies();"
        if opcode == "cp.async.wait_group":
            return f"c.wait_copies({int(operands[0])});"
        if opcode == "mapa.u64":
            code = f"c.map_peer({self.value(operands[1], 'u64')}, {self.value(operands[2], 'u32')}, {here})"
            return self.assign(operands[0], code, "uint64_t")
        if opcode == "prefetch.global.L1":
            return f"c.prefetch({self.address(operands[0])}, {line});"
        raise NotUnderstood(opcode)

    # ---- the function
    def locate(self, number: int, places: tuple[str, ...]) -> None:
        """Sets the source places of the lines from `number` on. Messages name the first place that is not in a device
        function (device.cuh)."""
        self.places = tuple(sorted(places, key=lambda place: place.startswith(("device.cuh", "launch.cuh"))))
        self.sources.append((number, self.places[0]))

    def label(self, name: str) -> None:
        self.body.append(f" {name.replace('$', 'L')}:;")
        self._block_ended = True

    def text(self) -> str:
        by_type: dict[str, list[str]] = {}
        for name, c_type in self.types.items():
            by_type.setdefault(c_type, []).append(f"{name} = {POISON[c_type]}")
        registers = [f"  {c_type} {', '.join(names)};" for c_type, names in by_type.items()]
        sources = ", ".join(f'{{{line}, "{place}"}}' for line, place in self.sources)
        return "\n".join([
            '#include "runtime.h"', "namespace fr::ptx {", "namespace {",
            f"constexpr Source kSources[] = {{{sources}}};",
            "void kernel(const void* params) {",
            f'  Thread c(params, {self.param_bytes}, "{self.file}", kSources, std::size(kSources));',
            *registers, *self.body, "}",
            f'const Registered registered{{"{self.name}", kernel, {self.param_bytes}, {self.max_threads}, '
            f"{self.blocks if self.counting else 0}}};",
            "}", "}", "",
        ])  # fmt: skip


def translate(text: str, file: str, counting: bool = False) -> list[Kernel]:
    """The kernels of a PTX file, of which `text()` is the C++; `file` is its name in messages.

    Raises:
        NotUnderstood: with every line that has no translation.
    """
    paths = {number: _place(path) for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    shared: set[str] = set()
    kernels: list[Kernel] = []
    kernel: Kernel | None = None
    errors: dict[str, str] = {}
    header = pending = ""
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        rest = re.sub(r"//.*", "", line).strip()
        if kernel is None:
            if found := re.fullmatch(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];", rest):
                shared.add(found[1])
            elif header or ".entry " in rest:
                header += " " + rest
                if rest == "{":
                    kernel = _kernel(header, file, shared, counting)
                    kernels.append(kernel)
                    header = ""
            elif rest and not OUTSIDE.match(rest):
                errors.setdefault(rest, f"{file}:{number}")
            continue
        if found := re.match(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at (\d+) (\d+))?", rest):
            if found[2] != "0":
                chain = (found.group(1, 2), found.group(3, 4))
                kernel.locate(number, tuple(f"{paths[f]}:{at}" for f, at in chain if f))
            continue
        if rest.startswith(".pragma"):
            continue
        while rest and kernel:  # a line may open a scope, hold several statements, and close it
            if not pending:
                if rest[0] == "{":
                    kernel.scopes.append({})
                    rest = rest[1:].strip()
                    continue
                if rest[0] == "}":
                    kernel.scopes.pop()
                    kernel = kernel if kernel.scopes else None
                    rest = rest[1:].strip()
                    continue
                if found := re.match(r"(\$\w+):\s*", rest):
                    kernel.label(found[1])
                    rest = rest[found.end() :]
                    continue
                start = number
            statement, end, rest = rest.partition(";")
            pending, rest = f"{pending} {statement}".strip(), rest.strip()
            if not end:
                break
            try:
                if found := re.fullmatch(r"\.reg \.(\w+)\s+(.*)", pending):
                    kernel.declare(found[1], found[2])
                else:
                    kernel.instruction(pending, start)
            except NotUnderstood as error:
                errors.setdefault(str(error), f"{file}:{start}")
            pending = ""
    if errors:
        raise NotUnderstood("\n".join(f"{place}: not understood: {what}" for what, place in errors.items()))
    return kernels


def _place(path: str) -> str:
    """The name of a source file: persistent/wait.cuh for one in csrc/cuda; other files lose their folders."""
    _, found, inside = path.rpartition("csrc/cuda/")
    return posixpath.normpath(inside) if found else posixpath.basename(path)


def _kernel(header: str, file: str, shared: set[str], counting: bool) -> Kernel:
    kernel = Kernel(re.search(r"\.entry (\w+)\(", header)[1], file, shared, counting)
    kernel.max_threads = int(re.search(r"\.maxntid (\d+)", header)[1])
    for align, name, size in re.findall(r"\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]", header):
        kernel.params[name] = kernel.param_bytes = -(-kernel.param_bytes // int(align)) * int(align)
        kernel.param_bytes += int(size)
    return kernel
