// Runs a package of AOTInductor without Python: package MODEL.pt2 libfastrnn_ops.so SIZE...
//
// The model's input has the given sizes, and values that run evenly from -1 to 1. Prints the output, one row a line.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int count, char** arguments) {
  if (count < 4) return std::fprintf(stderr, "usage: %s MODEL.pt2 libfastrnn_ops.so SIZE...\n", arguments[0]), 2;
  if (!dlopen(arguments[2], RTLD_NOW)) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  try {
    std::vector<int64_t> sizes;
    int64_t values = 1;
    for (int i = 3; i < count; ++i) sizes.push_back(std::atoll(arguments[i])), values *= sizes.back();
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    const at::Tensor output = model.run({at::linspace(-1, 1, values).view(sizes)})[0].contiguous();
    const float* const data = output.const_data_ptr<float>();
    for (int64_t i = 0; i < output.numel(); ++i) std::printf("%.9g%c", data[i], (i + 1) % output.size(-1) ? ' ' : '\n');
  } catch (const std::exception& error) { return std::fprintf(stderr, "%s\n", error.what()), 1; }
}
