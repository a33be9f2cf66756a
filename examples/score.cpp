// Scores a batch with an exported model, without Python:
//
//   score EXPORT INPUTS.safetensors dense ids [NAME.values NAME.offsets ...]
//
// The names are those of "inputs" in EXPORT/manifest.json, in that order. Prints a probability per
// line. The weights are mapped into memory, not read: processes share them. docs/export.md tells
// how to compile it.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using Tensors = std::unordered_map<std::string, at::Tensor>;

// A reader of the headers of safetensors files: JSON of a fixed form,
// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}.
struct Header {
  const char* at;
  const char* end;

  char peek() {
    while (at < end && std::isspace(static_cast<unsigned char>(*at))) ++at;
    if (at == end) throw std::runtime_error("the header of a safetensors file is cut off");
    return *at;
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at;
    return true;
  }
  void need(char wanted) {
    if (!take(wanted)) throw std::runtime_error(std::string("a safetensors header lacks ") + wanted);
  }
  std::string text() {
    need('"');
    std::string found;
    for (; at < end && *at != '"'; ++at) {
      if (*at == '\\' && ++at == end) break;
      found += *at;
    }
    need('"');
    return found;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> found;
    need('[');
    while (!take(']')) {
      take(',');
      int64_t value = 0;
      for (peek(); at < end && std::isdigit(static_cast<unsigned char>(*at)); ++at)
        value = 10 * value + (*at - '0');
      found.push_back(value);
      peek();
    }
    return found;
  }
};

at::ScalarType type_of(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> types = {
      {"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"I64", at::kLong}, {"I32", at::kInt},
      {"I8", at::kChar},   {"U8", at::kByte},       {"F64", at::kDouble}, {"F16", at::kHalf}};
  auto found = types.find(name);
  if (found == types.end()) throw std::runtime_error("unknown type " + name);
  return found->second;
}

Tensors map_tensors(const std::string& path) {
  int file = open(path.c_str(), O_RDONLY);
  struct stat about {};
  if (file < 0 || fstat(file, &about) != 0) throw std::runtime_error("can't open " + path);
  auto size = static_cast<size_t>(about.st_size);
  void* mapped = size ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error("can't map " + path);
  auto* bytes = static_cast<char*>(mapped);  // mapped until the process ends
  uint64_t length = 0;
  if (size >= 8) std::memcpy(&length, bytes, 8);
  if (size < 8 || length > size - 8) throw std::runtime_error(path + " is no safetensors file");
  char* data = bytes + 8 + length;
  size_t room = size - 8 - length;
  Header header{bytes + 8, data};
  Tensors found;
  header.need('{');
  while (!header.take('}')) {
    header.take(',');
    std::string name = header.text(), type;
    std::vector<int64_t> shape, place;
    header.need(':');
    header.need('{');
    while (!header.take('}')) {
      header.take(',');
      std::string key = header.text();
      header.need(':');
      if (key == "shape") shape = header.numbers();
      else if (key == "data_offsets") place = header.numbers();
      else if (key == "dtype") type = header.text();
      else header.text();  // of the metadata
    }
    if (name == "__metadata__") continue;
    size_t wanted = at::elementSize(type_of(type));
    for (int64_t extent : shape) wanted *= static_cast<size_t>(extent);
    bool fits = place.size() == 2 && place[0] >= 0 && place[1] >= place[0] &&
                static_cast<size_t>(place[1]) <= room &&
                static_cast<size_t>(place[1] - place[0]) == wanted;
    if (!fits) throw std::runtime_error(name + " does not fit into " + path);
    found[name] = at::from_blob(data + place[0], shape, at::TensorOptions().dtype(type_of(type)));
  }
  return found;
}

// The program does not check its inputs: with other sizes it reads memory that is not theirs.
void check(const std::string& name, const at::Tensor& input, const at::Tensor& dense) {
  bool first = input.is_same(dense), offsets = name.size() > 8 && name.rfind(".offsets") == name.size() - 8;
  int64_t dimensions = first || name == "ids" ? 2 : 1, batch = dense.dim() == 2 ? dense.size(1) : 0;
  bool fits = input.scalar_type() == (first ? at::kFloat : at::kLong) && input.dim() == dimensions &&
              (dimensions == 1 || input.size(1) == batch) && (!offsets || input.size(0) == batch + 1);
  if (!fits)
    throw std::runtime_error("input " + name + " has another type or size than manifest.json and the "
                             "batch of " + std::to_string(batch) + " rows say");
}

int main(int count, char** arguments) try {
  if (count < 5) {
    std::cerr << "usage: score EXPORT INPUTS.safetensors dense ids [NAME ...]\n";
    return 2;
  }
  std::string directory = arguments[1];
  torch::inductor::AOTIModelPackageLoader model(directory + "/model_cpu.pt2");
  Tensors weights = map_tensors(directory + "/weights.safetensors"), constants;
  for (const std::string& name : model.get_constant_fqns()) constants[name] = weights.at(name);
  model.load_constants(constants, /*use_inactive=*/false, /*check_full_update=*/true,
                       /*user_managed=*/true);  // as they are mapped, without a copy
  Tensors given = map_tensors(arguments[2]);
  std::vector<at::Tensor> inputs;
  for (int i = 3; i < count; ++i) {
    auto found = given.find(arguments[i]);
    if (found == given.end())
      throw std::runtime_error(std::string(arguments[2]) + " has no tensor " + arguments[i]);
    inputs.push_back(found->second);
    check(arguments[i], inputs.back(), inputs.front());
  }
  at::Tensor probability = model.run(inputs)[0];
  std::cout.precision(9);
  for (int64_t i = 0; i < probability.numel(); ++i)
    std::cout << probability.data_ptr<float>()[i] << "\n";
} catch (const c10::Error& error) {
  std::cerr << "error: " << error.what_without_backtrace() << "\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 2;
}
