// Runs vpdpbusd of AVX-VNNI on processors that lack it: a handler of the invalid opcode reads the instruction, does its
// sums and goes on behind it. So the compiled kernels are tested, with every register and address that they name.
// Encoding and sums: Intel 64 and IA-32 manual, volume 2, "VPDPBUSD" (VEX.256.66.0F38.W0 50 /r) and "Instruction
// Format". Layout of the saved registers: volume 1, "Standard Format of the XSAVE Area".
#pragma once

#if defined(__AVXVNNI__)
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace fr {

static long emulated_instructions = 0;

static void run_vpdpbusd(int, siginfo_t*, void* context) {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  const auto* const code = reinterpret_cast<const uint8_t*>(machine.gregs[REG_RIP]);
  // C4, then R X B inverted and the map 0F38, then W, the second source inverted, 256 bits and the prefix 66
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x87) != 0x05 || code[3] != 0x50) _exit(132);
  static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9,
      REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const bool r = !(code[1] & 0x80), x = !(code[1] & 0x40), b = !(code[1] & 0x20);
  const int mode = code[4] >> 6, to = (code[4] >> 3 & 7) + 8 * r, first = ~code[2] >> 3 & 15;
  int base = (code[4] & 7) + 8 * b, size = 5;

  auto* const saved = reinterpret_cast<uint8_t*>(machine.fpregs);
  unsigned high_halves = 0, length, c, d;
  __get_cpuid_count(13, 2, &length, &high_halves, &c, &d);
  const auto half = [&](int number, int which) {
    return which ? saved + high_halves + 16 * number : saved + 160 + 16 * number;
  };
  const auto read = [&](int number, uint8_t* bytes) {
    std::memcpy(bytes, half(number, 0), 16), std::memcpy(bytes + 16, half(number, 1), 16);
  };
  uint64_t present;  // components of the saved state; one that is absent has its first state, zeros
  std::memcpy(&present, saved + 512, sizeof present);
  if (!(present & 4)) std::memset(half(0, 1), 0, 256);

  uint8_t bytes[32], weights[32];
  read(first, bytes);
  if (mode == 3) read(base, weights);
  else {
    int64_t address = 0;
    if ((base & 7) == 4) {  // a byte with scale, index and base follows
      const int index = (code[5] >> 3 & 7) + 8 * x;
      base = (code[5] & 7) + 8 * b, size = 6;
      if (index != 4) address += machine.gregs[order[index]] * (1 << (code[5] >> 6));
    }
    if (mode == 0 && (base & 7) == 5) _exit(132);  // relative to the instruction or without a base: not used here
    address += machine.gregs[order[base]];
    int32_t distance = 0;
    if (mode == 1) distance = static_cast<int8_t>(code[size]), size += 1;
    if (mode == 2) std::memcpy(&distance, code + size, 4), size += 4;
    std::memcpy(weights, reinterpret_cast<const void*>(address + distance), sizeof weights);
  }
  for (int lane = 0; lane < 8; ++lane) {
    uint8_t* const at = half(to, lane / 4) + 4 * (lane % 4);
    uint32_t sum;
    std::memcpy(&sum, at, 4);
    for (int k = 4 * lane; k < 4 * lane + 4; ++k)
      sum += static_cast<uint32_t>(int{bytes[k]} * int{static_cast<int8_t>(weights[k])});
    std::memcpy(at, &sum, 4);
  }
  present |= 6;
  std::memcpy(saved + 512, &present, sizeof present);
  machine.gregs[REG_RIP] += size;
  ++emulated_instructions;
}

static void emulate_vnni() {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVXVNNI)) return;
  struct sigaction action {};
  action.sa_sigaction = run_vpdpbusd, action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace fr
#endif
