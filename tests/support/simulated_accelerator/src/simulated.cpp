// A simulated accelerator: memory that the host cannot touch, asynchronous streams, and the CPU's operators.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include "memory.h"
#include "shapes.h"

namespace simulated {

using at::Tensor;
using c10::IValue;

std::mutex waiting_mutex;
std::map<std::string, int64_t> waiting;  // calls of operators that were not queued

// ---- Streams, events, devices

struct Event {
  std::optional<Mark> mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before(TYPE, current_device);
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) device_of(to.index()), current_device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) current_device = to.index();
  }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, c10::DeviceIndex(device)), id);
  }
  static Queue& queue(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(index_of(device), 1 + device_of(index_of(device)).dealt++ % (STREAMS - 1));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(to.device_index(), std::exchange(current_streams[to.device_index()], to.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }  // all dtypes
  bool queryStream(const c10::Stream& stream) const override {
    return queue(stream).is_done(queue(stream).given());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counts.streams, queue(stream).wait(queue(stream).given());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    ++counts.devices;
    for (Queue* queue : devices[index].queues)
      if (queue) queue->wait(queue->given());
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = mark(queue(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && static_cast<Event*>(event)->mark) wait_for(queue(stream), *static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    const auto* known = static_cast<Event*>(event);
    return !known || !known->mark || known->mark->queue->query(known->mark->serial);
  }
  void synchronizeEvent(void* event) const override {
    ++counts.events;
    if (event && static_cast<Event*>(event)->mark)
      static_cast<Event*>(event)->mark->queue->wait(static_cast<Event*>(event)->mark->serial);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    synchronizeEvent(first), synchronizeEvent(second);
    const auto passed =
        *static_cast<Event*>(second)->mark->reached - *static_cast<Event*>(first)->mark->reached;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    memory.recordStream(ptr, stream);
  }
};

// ---- Views of device tensors as CPU tensors

struct Use {  // memory that a task accesses
  int device;
  void* address;
  size_t nbytes;
};
using Uses = std::vector<Use>;

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

size_t span_of(const Tensor& tensor) {
  size_t last = tensor.numel() ? 1 : 0;
  for (int64_t i = 0; i < tensor.dim() && last; ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last * tensor.itemsize();
}

Tensor as_cpu(const Tensor& tensor, Uses& uses) {
  if (!is_here(tensor)) return tensor;
  void* bytes = nullptr;
  if (tensor.numel()) {
    void* address = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
    uses.push_back({tensor.get_device(), address, span_of(tensor)});
    Device& device = devices[tensor.get_device()];
    bytes = device.bytes + (static_cast<char*>(address) - device.addresses);
  }
  Tensor made = at::from_blob(bytes, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}

void check(const Uses& uses) {
  for (const Use& use : uses) bytes_at(use.device, use.address, use.nbytes);
}

void queue_work(Queue& queue, Uses uses, std::function<void()> work) {
  ++counts.queued;
  queue.give([uses = std::move(uses), work = std::move(work)] { check(uses), work(); });
}

// Applies `f` to every tensor of a value.
template <typename F>
IValue each_tensor(const IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(f(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& tensor : value.toOptionalTensorVector())
      made.push_back(tensor && tensor->defined() ? std::optional<Tensor>(f(*tensor)) : tensor);
    return made;
  }
  return value;
}

// ---- Memory

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const int index = storage->device().index();
  c10::DeviceGuard guard(storage->device());
  auto fresh = memory.allocate(nbytes);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept) {
    char *from =
             devices[index].bytes + (static_cast<char*>(storage->mutable_data()) - devices[index].addresses),
         *to = devices[index].bytes + (static_cast<char*>(fresh.get()) - devices[index].addresses);
    queue_work(current_queue(index), {{index, storage->mutable_data(), kept}, {index, fresh.get(), kept}},
               [=] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(nbytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    const size_t nbytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
    if (nbytes > impl->unsafe_storage().nbytes())
      resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), nbytes);
  }
  if (format && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  stride.empty() && !size.empty() ? impl->set_sizes_contiguous(size)
                                  : impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

void record_stream(Tensor& self, c10::Stream stream) {
  memory.recordStream(self.storage().data_ptr(), stream);
}

// ---- Copies

bool is_pinned(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && Pinned::has(tensor.const_data_ptr(), tensor.nbytes());
}

void wait(Queue& queue) {
  ++counts.waited;
  queue.wait(queue.given());
}

// Returns the task of a copy between host and device.
std::function<void()> copying(Tensor to, Tensor from, at::Storage kept = {}) {
  if (is_due(faults.copy))
    return [] { TORCH_CHECK(false, "simulated accelerator: a copy failed by `fail`"); };
  return [to, from, kept]() mutable { to.copy_(from); };
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) return self;
  Uses uses;
  if (is_here(self) && is_here(source)) {
    Queue& queue = current_queue(source.get_device());
    Queue& other = current_queue(self.get_device());
    counts.peer += source.get_device() != self.get_device();
    Tensor from = as_cpu(source, uses), to = as_cpu(self, uses);
    wait_for(queue, mark(other));
    queue_work(queue, std::move(uses), [from, to]() mutable { to.copy_(from); });
    wait_for(other, mark(queue));
  } else if (is_here(self)) {
    Queue& queue = current_queue(self.get_device());
    Tensor to = as_cpu(self, uses), from = source;
    const bool is_direct = source.scalar_type() == self.scalar_type() && is_pinned(source) &&
                           !source.is_conj() && !source.is_neg();
    ++(is_direct ? counts.pinned : counts.pageable),
        (is_direct ? counts.pinned_bytes : counts.pageable_bytes) += source.nbytes();
    if (is_direct)  // the bytes are read when the task runs
      from = at::from_blob(source.data_ptr(), source.sizes(), source.strides(), source.options());
    else
      from = source.to(self.scalar_type(), false, true).resolve_conj().resolve_neg();
    auto kept = source.storage();  // keeps memory of `pin_memory` allocated meanwhile
    const bool is_ours = is_direct && kept.data_ptr().get_deleter() == &Pinned::give_back;
    queue_work(queue, std::move(uses), copying(to, from, is_ours ? kept : at::Storage()));
    if (!non_blocking) wait(queue);
  } else {
    Queue& queue = current_queue(source.get_device());
    Tensor from = as_cpu(source, uses), to = self;
    const bool is_direct =
        source.scalar_type() == self.scalar_type() && is_pinned(self) && self.sizes() == source.sizes();
    ++counts.to_host, counts.to_host_bytes += source.nbytes();
    if (is_direct) {
      auto kept = self.storage();
      const bool is_ours = kept.data_ptr().get_deleter() == &Pinned::give_back;
      to = at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options());
      queue_work(queue, std::move(uses), copying(to, from, is_ours ? kept : at::Storage()));
      if (!non_blocking) wait(queue);
    } else {
      wait(queue), check(uses);
      copying(to, from)();
    }
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  Uses uses;
  Tensor from = as_cpu(self, uses);
  wait(current_queue(self.get_device()));
  check(uses);
  return from.item();
}

// ---- All other operators

bool may_be_on_cpu(const Tensor& tensor, const std::string& name) {
  static const std::set<std::string> indexing{
      "aten::index",      "aten::_unsafe_index",    "aten::index_put",
      "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};  // as in CUDA
  return tensor.dim() == 0 || indexing.count(name);
}

bool is_queued(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded) || op.hasTag(at::Tag::data_dependent_output) ||
      op.hasTag(at::Tag::dynamic_output_shape))
    return false;
  for (const auto& result : op.schema().returns()) {
    const auto& type = result.type();
    if (!type->isSubtypeOf(*c10::TensorType::get()) && !type->isSubtypeOf(*c10::ListType::ofTensors()))
      return false;
  }
  return true;
}

Tensor as_meta(const Tensor& tensor) {
  const bool is_number = tensor.is_cpu() && tensor.dim() == 0;  // type promotion depends on its device
  return is_number ? tensor
                   : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Returns the results of an operator on `meta`, or nothing if it has no kernel there.
std::optional<Values> compute_shapes(const c10::OperatorHandle& op, const Values& arguments) {
  torch::jit::Stack shapes;
  for (const IValue& value : arguments)
    shapes.push_back(value.isDevice() ? IValue(c10::Device(at::kMeta)) : each_tensor(value, as_meta));
  try {
    op.callBoxed(&shapes);
    return shapes;
  } catch (const std::exception& error) {
    if (std::getenv("SIMULATED_VERBOSE"))
      fprintf(stderr, "simulated accelerator: %s is not queued: %s\n", op.schema().name().c_str(),
              error.what());
    return {};
  }
}

// Returns the argument that a result aliases, or nullptr for a new tensor.
const c10::Argument* shared_with(const c10::FunctionSchema& schema, const c10::Argument& result,
                                 size_t& index) {
  if (const auto* alias = result.alias_info())
    for (index = 0; index < schema.arguments().size(); ++index) {
      const auto* other = schema.arguments()[index].alias_info();
      if (other && !other->beforeSets().empty() && other->beforeSets() == alias->beforeSets())
        return &schema.arguments()[index];
    }
  return nullptr;
}

void run_by_cpu(const c10::OperatorHandle& asked, torch::jit::Stack* stack) {
  static const auto convolution = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  const c10::OperatorHandle op =
      asked.schema().name() == "aten::convolution_overrideable" ? convolution : asked;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> arguments(stack->end() - count, stack->end());
  std::optional<c10::Device> where;
  for (const IValue& value : arguments)
    each_tensor(value, [&](const Tensor& tensor) {
      if (is_here(tensor)) {
        TORCH_CHECK(!where || *where == tensor.device(),
                    "Expected all tensors to be on the same device, but ", name, " got ", *where, " and ",
                    tensor.device());
        where = tensor.device();
      }
      return tensor;
    });
  for (const IValue& value : arguments)
    each_tensor(value, [&](const Tensor& tensor) {
      TORCH_CHECK(!where || is_here(tensor) || may_be_on_cpu(tensor, name),
                  "Expected all tensors to be on the same device, but ", name, " got ", *where, " and ",
                  tensor.device());
      return tensor;
    });
  const bool has_tensors = where.has_value();
  if (!has_tensors)
    for (const IValue& value : arguments)
      if (value.isDevice()) where = value.toDevice();
  TORCH_CHECK(where, "simulated accelerator: ", name, " names no device");
  const int index = Guard::index_of(*where);
  Queue& queue = current_queue(index);
  at::AutoDispatchBelowADInplaceOrView below;

  std::vector<IValue> results;
  bool can_queue = has_tensors && is_queued(op);
  if (can_queue) {
    auto shapes = shapes_of(op, arguments, [&] { return compute_shapes(op, arguments); });
    can_queue = shapes.has_value();
    if (can_queue) results = std::move(*shapes);
  }
  Uses uses;
  torch::jit::Stack inputs;
  bool is_view = false;
  if (can_queue) {
    for (size_t i = 0; i < results.size(); ++i) {
      size_t shared = 0;
      const auto* argument = shared_with(schema, schema.returns()[i], shared);
      if (!argument) {
        results[i] = each_tensor(results[i], [&](const Tensor& like) {
          return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, c10::Device(TYPE, index),
                               {});
        });
      } else if (argument->alias_info()->isWrite()) {
        if (arguments[shared].isTensor() &&
            results[i].toTensor().sizes() != arguments[shared].toTensor().sizes())
          resize_(arguments[shared].toTensor(), results[i].toTensor().sizes(), std::nullopt);
        results[i] = arguments[shared];
      } else {
        const Tensor& base = arguments[shared].toTensor();
        results[i] = each_tensor(results[i], [&](const Tensor& like) {
          return at::native::as_strided_tensorimpl(base, like.sizes(), like.strides(),
                                                   base.storage_offset() + like.storage_offset());
        });
        is_view = true;
      }
    }
    if (!is_view) {
      for (const IValue& value : arguments)
        inputs.push_back(
            each_tensor(value, [&](const Tensor& t) { return is_here(t) ? as_cpu(t, uses) : t.clone(); }));
      for (size_t i = 0; i < arguments.size(); ++i)  // type promotion depends on it
        if (arguments[i].isTensor() && inputs[i].toTensor().defined() &&
            arguments[i].toTensor().unsafeGetTensorImpl()->is_wrapped_number())
          inputs[i].toTensor().unsafeGetTensorImpl()->set_wrapped_number(true);
      std::vector<IValue> targets;
      for (const IValue& value : results)
        targets.push_back(each_tensor(value, [&](const Tensor& tensor) { return as_cpu(tensor, uses); }));
      queue_work(queue, std::move(uses), [op, inputs, targets]() {
        torch::jit::Stack stack = inputs;
        op.callBoxed(&stack);
        for (size_t i = 0; i < stack.size(); ++i) {
          std::vector<Tensor> made, wanted;
          each_tensor(stack[i], [&](const Tensor& tensor) { return made.push_back(tensor), tensor; });
          each_tensor(targets[i], [&](const Tensor& tensor) { return wanted.push_back(tensor), tensor; });
          for (size_t j = 0; j < wanted.size(); ++j)
            if (wanted[j].numel() && made[j].const_data_ptr() != wanted[j].const_data_ptr())
              wanted[j].copy_(made[j]);
        }
      });
    }
  } else {
    {
      std::lock_guard<std::mutex> lock(waiting_mutex);
      ++waiting[name];
    }
    wait(queue);
    for (const IValue& value : arguments)
      inputs.push_back(value.isDevice()
                           ? IValue(c10::Device(at::kCPU))
                           : each_tensor(value, [&](const Tensor& t) { return as_cpu(t, uses); }));
    check(uses);
    op.callBoxed(&inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      size_t shared = 0;
      const auto* argument = shared_with(schema, schema.returns()[i], shared);
      results.push_back(argument ? arguments[shared] : each_tensor(inputs[i], [&](const Tensor& made) {
        Tensor tensor =
            empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, c10::Device(TYPE, index), {});
        Uses unused;
        as_cpu(tensor, unused).copy_(made);
        return tensor;
      }));
    }
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0;  // the math implementation
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_by_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp) KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
        KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp) KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
            KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
                KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_by_cpu>());
}

// ---- Hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    device_of(device), current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, int(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return Pinned::has(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (int index = 0; index < device_count; ++index)
      if (size_t(static_cast<char*>(data) - devices[index].addresses) < SPAN)
        return {TYPE, c10::DeviceIndex(index)};
    TORCH_CHECK(false, "simulated accelerator: not an address of a device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

void set_delay(bool is_default, int64_t delay_us, bool is_lazy) {
  Delay& delay = delays[!is_default];
  delay.delay_us = delay_us, delay.is_lazy = is_lazy;
  for (int index = 0; index < device_count; ++index)
    for (Queue* queue : devices[index].queues)
      if (queue) queue->wake();
}

std::map<std::string, int64_t> take_counts() {
  std::map<std::string, int64_t> taken;
  const std::pair<const char*, std::atomic<int64_t>*> all[] = {{"queued", &counts.queued},
                                                               {"waited", &counts.waited},
                                                               {"device synchronizations", &counts.devices},
                                                               {"stream synchronizations", &counts.streams},
                                                               {"event synchronizations", &counts.events},
                                                               {"allocations", &counts.allocations},
                                                               {"peer copies", &counts.peer},
                                                               {"pinned copies", &counts.pinned},
                                                               {"pinned bytes", &counts.pinned_bytes},
                                                               {"pageable copies", &counts.pageable},
                                                               {"pageable bytes", &counts.pageable_bytes},
                                                               {"copies to host", &counts.to_host},
                                                               {"bytes to host", &counts.to_host_bytes}};
  for (const auto& [name, number] : all) taken[name] = number->exchange(0);
  std::lock_guard<std::mutex> lock(waiting_mutex);
  for (const auto& [name, times] : waiting) taken[name] = times;
  waiting.clear();
  return taken;
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  m.def("start", [](int count) {
    device_count = count;
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::setHostAllocator(TYPE, &pinned);
  });
  m.def("set_capacity", [](int index, size_t nbytes) { device_of(index).capacity = nbytes; });
  m.def("capacity", [](int index) { return device_of(index).capacity; });
  m.def("fail", [](int64_t copy, int64_t allocation) {
    faults.copy = copy, faults.allocation = allocation;
    for (int index = 0; index < device_count; ++index)
      for (Queue* queue : devices[index].queues)
        if (queue) queue->forgive();
  });
  m.def("set_delay", set_delay);
  m.def("fill_fresh_memory", [](bool fills) { fills_fresh_memory = fills; });
  m.def("take_counts", take_counts);
  m.def("host_register", [](uintptr_t first, size_t nbytes) { Pinned::add(first, nbytes); });
  m.def("host_unregister", [](uintptr_t first) { Pinned::remove(first); });
}
