// Shapes of the results of operators, which are computed once for all arguments that look the same.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

using Values = std::vector<c10::IValue>;

// Everything that the shapes of an operator's results depend on.
class Key {
 public:
  std::string bytes;

  explicit Key(const c10::OperatorHandle& op) {
    put(op.schema().name()), put(op.schema().overload_name());
    put(c10::get_default_dtype_as_scalartype());
  }

  // Returns false for a kind of value that it does not know.
  bool add(const c10::IValue& value) {
    put(value.tagKind());
    if (value.isNone()) return true;
    if (value.isTensor()) return put(value.toTensor()), true;
    if (value.isInt()) return put(value.toInt()), true;
    if (value.isDouble()) return put(value.toDouble()), true;
    if (value.isBool()) return put(value.toBool()), true;
    if (value.isDevice()) return true;  // is replaced by `meta`
    if (value.isString()) return put(value.toStringRef()), true;
    if (value.isIntList()) return put(c10::IntArrayRef(value.toIntVector())), true;
    if (value.isTensorList()) return put_all(value.toTensorVector()), true;
    if (value.isOptionalTensorList()) return put_all(value.toOptionalTensorVector()), true;
    return false;
  }

 private:
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>>
  void put(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(const std::string& text) { put(text.size()), bytes += text; }
  void put(c10::IntArrayRef values) {
    put(values.size());
    for (int64_t value : values) put(value);
  }
  void put(const at::Tensor& tensor) {
    put(tensor.defined());
    if (!tensor.defined()) return;
    put(tensor.scalar_type()), put(tensor.sizes()), put(tensor.strides());
    put(tensor.device().type()), put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    if (tensor.is_cpu() && tensor.dim() == 0)  // a number, whose value may matter
      bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  void put(const std::optional<at::Tensor>& tensor) {
    put(tensor.has_value());
    if (tensor) put(*tensor);
  }
  template <typename List>
  void put_all(const List& tensors) {
    put(tensors.size());
    for (const auto& tensor : tensors) put(tensor);
  }
};

// Returns what `compute` returns; for the same operator and arguments that look the same, it is called once.
template <typename Compute>
std::optional<Values> shapes_of(const c10::OperatorHandle& op, const Values& arguments, Compute compute) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<std::string, std::optional<Values>>;  // tensors outlive Python
  Key key(op);
  for (const c10::IValue& value : arguments)
    if (!key.add(value)) return compute();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known.find(key.bytes); found != known.end()) return found->second;
  }
  std::optional<Values> made = compute();
  std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(std::move(key.bytes), std::move(made)).first->second;
}

}  // namespace simulated
