// Runs an LSTM on the CPU without Python and without torch: serve FILE.safetensors [THREADS]
//
// FILE holds a fastrnn.LSTM's (or torch.nn.LSTM's) parameters by their names and the tensor `input` [T, B, I], all
// float32; the layers may be stacked, bidirectional and without biases. Prints the output, one row of T*B a line.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <rnn.h>

namespace {

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Tensor>;

// The numbers of `"key":[1,2,...]`.
std::vector<int64_t> numbers(const std::string& text, const std::string& key) {
  const size_t begin = text.find('"' + key + "\":[");
  if (begin == std::string::npos) throw std::runtime_error("no \"" + key + "\" in the header");
  std::vector<int64_t> found;
  const char* at = text.c_str() + begin + key.size() + 4;
  while (*at != ']') {
    char* end;
    found.push_back(std::strtoll(at, &end, 10));
    if (end == at) throw std::runtime_error("\"" + key + "\" in the header is no list of numbers");
    at = *end == ',' ? end + 1 : end;
  }
  return found;
}

// https://github.com/huggingface/safetensors#format, as its writer makes it: no blanks in the JSON of the header.
Tensors read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened");
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t size = 0;
  if (bytes.size() >= 8) std::memcpy(&size, bytes.data(), 8);
  if (!size || size > bytes.size() - 8) throw std::runtime_error("is no safetensors file");
  const std::string header = bytes.substr(8, size);
  const char* const data = bytes.data() + 8 + size;
  const int64_t limit = static_cast<int64_t>(bytes.size() - 8 - size);

  Tensors tensors;
  for (size_t at = header.find("{\"dtype\""); at != std::string::npos; at = header.find("{\"dtype\"", at + 1)) {
    const size_t name_end = header.rfind('"', at), name = header.rfind('"', name_end - 1) + 1;
    const std::string key = header.substr(name, name_end - name), of = header.substr(at, header.find('}', at) - at);
    if (of.find("\"F32\"") == std::string::npos) throw std::runtime_error(key + " should be float32");
    Tensor& tensor = tensors[key];
    tensor.shape = numbers(of, "shape");
    const std::vector<int64_t> range = numbers(of, "data_offsets");
    int64_t count = 1;
    for (const int64_t n : tensor.shape) count *= n;
    if (range.size() != 2 || range[0] < 0 || range[1] > limit || range[1] - range[0] != count * 4)
      throw std::runtime_error(key + " does not lie in the file");
    tensor.values.resize(count);
    std::memcpy(tensor.values.data(), data + range[0], count * 4);
  }
  return tensors;
}

const Tensor& find(const Tensors& tensors, const std::string& name, size_t dimensions) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw std::runtime_error("has no tensor " + name);
  if (found->second.shape.size() != dimensions)
    throw std::runtime_error(name + " should have " + std::to_string(dimensions) + " dimensions");
  return found->second;
}

// One layer, both directions of a bidirectional one in the same call.
Tensor run(const Tensors& tensors, const Tensor& input, int layer, int threads) {
  const std::string suffix = "_l" + std::to_string(layer);
  const int directions = tensors.count("weight_ih" + suffix + "_reverse") ? 2 : 1;
  const int64_t steps = input.shape[0], batch = input.shape[1], inputs = input.shape[2];
  const int64_t hidden = find(tensors, "weight_hh" + suffix, 2).shape[1];
  Tensor output{{steps, batch, directions * hidden}, std::vector<float>(steps * batch * directions * hidden)};
  std::vector<float> last(2 * directions * batch * hidden);  // h_n and c_n

  fr::ForwardArgs args{};
  args.shape.cell = fr::Cell::kLstm;
  args.shape.type = fr::Type::kFloat32;
  args.shape.steps = steps, args.shape.batch = batch, args.shape.input = inputs, args.shape.hidden = hidden;
  args.threads = threads;
  args.directions = directions;
  args.direction.resize(directions);
  for (int d = 0; d < directions; ++d) {
    const auto parameter = [&](const char* name, int64_t columns) -> const float* {
      const std::string key = name + suffix + (d ? "_reverse" : "");
      const Tensor& of = find(tensors, key, columns ? 2 : 1);
      if (of.shape[0] != 4 * hidden || (columns && of.shape[1] != columns))
        throw std::runtime_error(key + " has another shape");
      return of.values.data();
    };
    fr::ForwardDirection& to = args.direction[d];
    to.reverse = d == 1;
    to.weights.ih = parameter("weight_ih", inputs), to.weights.ih_stride = inputs;
    to.weights.hh = parameter("weight_hh", hidden), to.weights.hh_stride = hidden;
    if (tensors.count("bias_ih" + suffix))
      to.weights.bias_ih = parameter("bias_ih", 0), to.weights.bias_hh = parameter("bias_hh", 0);
    to.input = {const_cast<float*>(input.values.data()), batch * inputs, inputs};  // only read
    to.output = {output.values.data() + d * hidden, batch * directions * hidden, directions * hidden};
    to.h_n = last.data() + 2 * d * batch * hidden;
    to.c_n = last.data() + (2 * d + 1) * batch * hidden;
  }
  fr::cpu_forward(args);
  return output;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return std::fprintf(stderr, "usage: %s FILE.safetensors [THREADS]\n", arguments[0]), 2;
  try {
    const Tensors tensors = read(arguments[1]);
    const int threads = count > 2 ? std::atoi(arguments[2]) : 1;
    Tensor x = find(tensors, "input", 3);
    for (int layer = 0; !layer || tensors.count("weight_ih_l" + std::to_string(layer)); ++layer)
      x = run(tensors, x, layer, threads);
    for (size_t i = 0; i < x.values.size(); ++i) std::printf("%.9g%c", x.values[i], (i + 1) % x.shape[2] ? ' ' : '\n');
  } catch (const std::exception& error) { return std::fprintf(stderr, "%s: %s\n", arguments[1], error.what()), 1; }
}
