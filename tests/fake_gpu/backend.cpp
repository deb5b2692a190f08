// A PyTorch backend (PrivateUse1) of two devices on the CPU's memory, as strict as CUDA where CUDA would refuse or wait.
//
// Operators run on the CPU. New memory is full of 0xFF (NaN, or -1), so that use of it unset shows. An operator over
// tensors of two devices raises, but for numbers (0-dim CPU tensors) and CPU indices, which CUDA takes as well. Every
// operator, copy and allocation is reported to `watch`: "launch", "alloc", "copy" (no wait: pinned and non-blocking, or
// within the device) and "wait" (the host waits for the device, or for a copy out of pageable memory).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

thread_local c10::DeviceIndex current = 0;
thread_local int within = 0;  // operators that run: what they do inside is not the program's doing

using Watch = void (*)(const char* kind, const char* name, const char* detail);
Watch watcher = nullptr;

void report(const char* kind, const std::string& name, const std::string& detail) {
  if (watcher && !within) watcher(kind, name.c_str(), detail.c_str());
}

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? *device : c10::Device(kFake, current);
}

// ---- memory

std::mutex memory_lock;
std::unordered_map<void*, std::pair<size_t, int>> blocks;
std::unordered_set<const void*> pinned;
size_t held[kDevices], most[kDevices];
size_t limit = SIZE_MAX;
size_t allocations_left = SIZE_MAX;  // before one fails

void release(void* address) {
  std::lock_guard<std::mutex> guard(memory_lock);
  if (auto found = blocks.find(address); found != blocks.end()) {
    held[found->second.second] -= found->second.first;
    blocks.erase(found);
  }
  free(address);
}

// Whether there is room for `size` more bytes on the current device, which are then counted.
bool take(size_t size) {
  std::lock_guard<std::mutex> guard(memory_lock);
  const bool fails = allocations_left == 0;
  if (fails) allocations_left = SIZE_MAX;
  if (allocations_left != SIZE_MAX) allocations_left--;
  if (fails || held[current] + size > limit) return false;
  held[current] += size;
  most[current] = std::max(most[current], held[current]);
  return true;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = nullptr;
    if (size) {
      // No error is made under the lock: it may ask for Python's, whose holder may be about to free memory.
      TORCH_CHECK_WITH(
          OutOfMemoryError, take(size), "fake GPU out of memory: ", size, " bytes more than the ", held[current],
          " held of ", limit);
      TORCH_CHECK(posix_memalign(&address, 512, size) == 0, "the host has no memory");
      memset(address, 0xFF, size);
      std::lock_guard<std::mutex> guard(memory_lock);
      blocks[address] = {size, current};
    }
    report("alloc", "allocate", std::to_string(size));
    return {address, address, &release, c10::Device(kFake, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

void unpin(void* address) {
  std::lock_guard<std::mutex> guard(memory_lock);
  pinned.erase(address);
  free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 512, std::max<size_t>(size, 1)) == 0, "the host has no memory");
    std::lock_guard<std::mutex> guard(memory_lock);
    pinned.insert(address);
    return {address, address, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kFake, &device_memory);

// ---- the current device, streams that are always done, and random numbers

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kFake, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no fake device ", static_cast<int>(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(42) {
    device_ = c10::Device(kFake, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  at::Generator on_cpu = at::detail::createCPUGenerator();  // draws its numbers
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> guard(memory_lock);
    return pinned.count(address) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> generators = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return generators[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// ---- operators of their own: memory, views and copies

at::Tensor seen_by_cpu(const at::Tensor& x) {
  return x.is_cpu() ? x : at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

std::string described(const at::Tensor& x) {
  std::ostringstream text;
  text << x.device() << " " << x.sizes() << " " << x.dtype().name();
  return text.str();
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto& host = from.is_cpu() ? from : to;
  const bool waits = (from.is_cpu() || to.is_cpu()) && !(non_blocking && host.is_pinned());
  const bool own = from.device() == to.device();
  report(waits ? "wait" : own ? "launch" : "copy", "copy_", described(from) + " -> " + described(to));
  at::NoGradGuard no_grad;
  seen_by_cpu(to).copy_(seen_by_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  at::NoGradGuard no_grad;
  seen_by_cpu(to).copy_(seen_by_cpu(from));
  return to;
}

at::Scalar local_scalar(const at::Tensor& x) {
  report("wait", "item", described(x));
  return at::_local_scalar_dense(seen_by_cpu(x));
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(x.device());
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor reshape_alias(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor as_strided(
    const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef size) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor unfold(const at::Tensor& x, int64_t axis, int64_t size, int64_t step) {
  return at::native::unfold(x, axis, size, step);
}
at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) { return at::cpu::set_(x, source); }
at::Tensor& set_storage(at::Tensor& x, at::Storage source) { return at::cpu::set_(x, source); }
at::Tensor& set_storage_part(
    at::Tensor& x, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      x, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// ---- all others: checked, reported, and run on the CPU

const std::set<std::string> indexing = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate"};
// The size of what they return is known on the device alone.
const std::set<std::string> waiting = {
    "aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2", "aten::_unique",
    "aten::unique_dim", "aten::bincount", "aten::equal", "aten::is_nonzero"};

struct Arguments {
  std::vector<std::pair<size_t, at::Tensor>> tensors;
  std::optional<at::Generator> generator;
  std::optional<c10::Device> asked, device;
  bool masked = false, cpu_index = false;

  Arguments(const torch::jit::Stack& stack, size_t begin, size_t count) {
    for (size_t i = 0; i < count; i++) {
      const auto& value = stack[begin + i];
      if (value.isTensor()) {
        add(i, value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& x : value.toTensorList()) add(i, x);
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& x : value.toOptionalTensorList()) {
          if (!x || !x->defined()) continue;
          add(i, *x);
          masked |= x->scalar_type() == at::kBool || x->scalar_type() == at::kByte;
        }
      } else if (value.isGenerator()) {
        generator = value.toGenerator();
      } else if (value.isDevice()) {
        asked = value.toDevice();
      }
    }
  }

  void add(size_t place, const at::Tensor& x) {
    if (!x.defined()) return;
    tensors.emplace_back(place, x);
    if (!x.is_cpu() && !device) device = x.device();
  }

  std::string all() const {
    std::string text;
    for (const auto& [place, x] : tensors) text += " argument " + std::to_string(place) + ": " + described(x) + ";";
    return text;
  }

  void check(const std::string& name) {
    for (const auto& [place, x] : tensors) {
      if (!device || x.device() == *device || (x.is_cpu() && x.dim() == 0)) continue;
      if (x.is_cpu() && indexing.count(name) && place == 1) {
        cpu_index = true;
        continue;
      }
      TORCH_CHECK(false, "tensors of two devices in ", name, ":", all());
    }
    const auto place = device ? device : asked;
    if (generator && generator->defined() && place)
      TORCH_CHECK(generator->device().type() == place->type(), "a generator of another device in ", name);
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  Arguments arguments(*stack, begin, count);
  arguments.check(name);
  const bool repeats = name == "aten::repeat_interleave" && schema.overload_name() == "Tensor";
  const bool waits = waiting.count(name) || (indexing.count(name) && (arguments.masked || arguments.cpu_index)) ||
      (repeats && (*stack)[begin + 1].isNone());
  report(waits ? "wait" : "launch", name, watcher && !within ? arguments.all() : "");
  const bool fake = arguments.asked && arguments.asked->type() == kFake;
  c10::DeviceGuard guard(
      arguments.device ? *arguments.device : device_or_current(fake ? arguments.asked : std::nullopt));
  struct Within {
    Within() { within++; }
    ~Within() { within--; }
  } inside;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isGenerator() && value.toGenerator().device().type() == kFake)
      value = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->on_cpu;
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
}

extern "C" {
void fake_gpu_register() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
void fake_gpu_watch(Watch watch) { watcher = watch; }
int fake_gpu_current() { return current; }
void fake_gpu_use(int device) { current = static_cast<c10::DeviceIndex>(device); }
size_t fake_gpu_held(int device) { return held[device]; }
size_t fake_gpu_most(int device) { return most[device]; }
void fake_gpu_forget_most(int device) { most[device] = held[device]; }
void fake_gpu_limit(size_t bytes) { limit = bytes; }
void fake_gpu_fail_after(size_t allocations) { allocations_left = allocations; }
}
