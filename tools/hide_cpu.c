// Shows a program a processor without some of this one's instruction sets, so that every library in it takes other
// code, ONNX Runtime too, which has no setting for that. HIDE=amx hides AMX; HIDE=avx512, the default, all above AVX2:
//
//   gcc -O1 -shared -fPIC -o hide_cpu.so tools/hide_cpu.c
//   LD_PRELOAD=./hide_cpu.so fastrnn bench --cases cpu
//
// Linux can let the instruction cpuid fault (arch_prctl(2), ARCH_SET_CPUID), on processors whose /proc/cpuinfo lists
// cpuid_fault. The handler runs it and clears bits of the answer. Threads and forked processes inherit that, and
// programs that are executed load this library anew. Bits: Intel 64 and IA-32 manual, volume 2, "CPUID".
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012  // asm/prctl.h

static int only_amx = 0;

static long allow_cpuid(unsigned long allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static unsigned without(unsigned value, const int* bits) {
  for (; *bits >= 0; ++bits) value &= ~(1u << *bits);
  return value;
}

// AMX. Leaf 7: BF16, TILE, INT8; its second part: FP16 | COMPLEX.
static const int kAmx7d[] = {22, 24, 25, -1}, kAmx71a[] = {21, -1}, kAmx71d[] = {8, -1};
// AVX-512 and VNNI. Leaf 7: F, DQ, IFMA, PF, ER, CD, BW, VL | VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ | 4VNNIW, 4FMAPS,
// VP2INTERSECT, FP16; its second part: AVX-VNNI, AVX512-BF16, AVX-IFMA | AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16,
// AVX10.
static const int k7b[] = {16, 17, 21, 26, 27, 28, 30, 31, -1}, k7c[] = {1, 6, 11, 12, 14, -1},
                 k7d[] = {2, 3, 8, 23, -1};
static const int k71a[] = {4, 5, 23, -1}, k71d[] = {4, 5, 10, 19, -1};

static void on_fault(int signal_number, siginfo_t* info, void* opaque) {
  ucontext_t* context = opaque;
  greg_t* registers = context->uc_mcontext.gregs;
  const unsigned char* at = (const unsigned char*)registers[REG_RIP];
  if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {
    signal(signal_number, SIG_DFL);  // another fault: it happens again, and ends the program
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
  unsigned a, b, c, d;
  allow_cpuid(1);
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
  allow_cpuid(0);
  if (leaf == 7 && part == 0) d = without(d, kAmx7d);
  if (leaf == 7 && part == 1) a = without(a, kAmx71a), d = without(d, kAmx71d);
  if (!only_amx) {
    if (leaf == 7 && part == 0) b = without(b, k7b), c = without(c, k7c), d = without(d, k7d);
    if (leaf == 7 && part == 1) a = without(a, k71a), d = without(d, k71d);
    if (leaf == 13 && part == 0) a &= 7;  // states of x87, SSE and AVX
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
  const char* hide = getenv("HIDE");
  only_amx = hide && strcmp(hide, "amx") == 0;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, NULL);
  if (allow_cpuid(0)) perror("hide_cpu: this machine cannot let cpuid fault");
}
