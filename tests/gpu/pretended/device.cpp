// A pretended CUDA device: its memory is the host's, and its operators are those of the CPU.
//
// Tensors are on `cuda:0`, or on one of PRETENDED_CUDA_COUNT devices, and use the dispatcher's CUDA keys. So the device
// refuses what a real GPU refuses: an operation on tensors of two devices, a CPU generator for a GPU tensor, `numpy()`
// of a GPU tensor. It counts the operations that make the host wait for a real GPU. Asynchronous copies are made late:
// until the host waits for an event that was recorded after a copy, pinned memory does not have the copied values, and
// a copy to the GPU gets what is written into pinned memory before then. Each device has one stream; kernels written
// for GPUs do not run.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <cstdlib>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

at::Tensor on_host(const at::Tensor& given) {  // a CPU tensor that shares, and keeps alive, the memory of `given`
  if (!given.defined() || given.device().is_cpu()) return given;
  auto options = given.options().device(c10::DeviceType::CPU);
  if (given.numel() == 0) return at::empty_strided(given.sizes(), given.strides(), options);
  auto made = at::from_blob(const_cast<void*>(given.const_data_ptr()), given.sizes(), given.strides(),
                            [kept = given.storage()](void*) {}, options);
  if (given.is_conj()) made = made.conj();
  if (given.is_neg()) made = made._neg_view();
  return made;
}

namespace {

const int COUNT = std::getenv("PRETENDED_CUDA_COUNT") ? std::atoi(std::getenv("PRETENDED_CUDA_COUNT")) : 1;
thread_local c10::DeviceIndex current = 0;

c10::Device here() { return c10::Device(c10::DeviceType::CUDA, current); }

void check_index(c10::DeviceIndex index) { TORCH_CHECK(0 <= index && index < COUNT, "CUDA error: invalid device ordinal"); }

struct On {  // makes a device the current one during its lifetime
  explicit On(std::optional<c10::Device> device) : before(current) {
    if (device && device->is_cuda() && device->has_index()) {
      check_index(device->index());
      current = device->index();
    }
  }
  ~On() { current = before; }
  c10::DeviceIndex before;
};

// ---- operations that make the host wait for the GPU

std::mutex waits_lock;
std::map<std::string, long> waits;
thread_local int inside = 0;  // depth of nested operators; only the outermost one is counted

void wait_for(const std::string& why) {
  std::lock_guard<std::mutex> held(waits_lock);
  waits[why]++;
}

// Operators that always wait, as the host must know the size or a value of their result.
const std::set<std::string> WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
    "aten::argwhere", "aten::multinomial"};

// Whether an operator waits that does so only with some arguments.
bool given_to_wait(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  if (name == "aten::repeat_interleave") return stack[first + 1].isNone();  // reads the size of the result
  if (name == "aten::segment_reduce") return !stack[first + 6].toBool();    // unsafe=True does not check lengths
  if (name != "aten::index_put_" && name != "aten::_index_put_impl_" && name != "aten::index_put") return false;
  int masks = 0, given = 0;
  for (const std::optional<at::Tensor>& each : stack[first + 1].toOptionalTensorVector()) {
    if (!each || !each->defined()) continue;
    if (each->is_cpu()) return true;
    given++;
    masks += each->scalar_type() == at::kBool || each->scalar_type() == at::kByte;
  }
  bool from_host = stack[first + 2].toTensor().is_cpu();       // x[i] = 1: torch makes a CPU tensor of the 1
  return from_host ? !(masks == 1 && given == 1) : masks > 0;  // x[mask] = 1 becomes masked_fill
}

// ---- forks of a process that has used the GPU, which cannot use it

std::atomic<bool> asked{false}, used{false}, forked{false};

void use() {
  TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
                       "the 'spawn' start method");
  used = asked = true;
}

// ---- memory

constexpr size_t PAGE = 4096;

size_t in_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void* taken(size_t bytes) {  // allocates whole pages, so that other processes can map them
  void* found = std::aligned_alloc(PAGE, in_pages(bytes));
  TORCH_CHECK(found, "no memory for ", bytes, " bytes");
  return found;
}

std::mutex lent_lock;
std::map<const void*, std::pair<int, size_t>> lent;  // address -> (file, bytes)

void given_back(void* data) {  // frees memory; what other processes may have mapped is never reused
  std::lock_guard<std::mutex> held(lent_lock);
  if (lent.count(data) == 0) std::free(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    void* data = bytes == 0 ? nullptr : taken(bytes);
    return {data, data, &given_back, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &given_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // address -> bytes

struct Pinned final : c10::Allocator {
  static void release(void* data) {
    { std::lock_guard<std::mutex> held(pinned_lock); pinned.erase(static_cast<const char*>(data)); }
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::DeviceType::CPU)};
    void* data = taken(bytes);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Pinned pinned_memory;

bool is_pinned_pointer(const void* given) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(given));
  if (after == pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(given) < found->first + found->second;
}

// ---- generators, the device's guard, and its hooks

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::Device device, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), own(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the pretended GPU's generator has no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device());
    made->own = own.clone();
    return made;
  }
  at::Generator own;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int n = 0; n < COUNT; n++) {
      all.push_back(at::make_generator<DeviceGenerator>(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(n))));
    }
    return all;
  }();
  check_index(index);
  return made[index];
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = here();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(COUNT); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
Guard guard;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return COUNT; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(COUNT); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  c10::Device getDeviceFromPtr(void*) const override { return here(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex given) const override {  // the first one of a device is its default
    static std::vector<std::atomic_flag> made(COUNT);
    auto index = given < 0 ? current : given;
    check_index(index);
    if (!made[index].test_and_set()) return default_generator(index);
    return at::make_generator<DeviceGenerator>(c10::Device(c10::DeviceType::CUDA, index));
  }
  void deviceSynchronize(c10::DeviceIndex) const override { wait_for("synchronize"); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// ---- operators

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
  On on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

// Copies between the GPU and pinned memory for which the host has not waited yet, in the order of their numbers.
struct LateCopy {
  uint64_t number;
  at::Tensor to, from;
};
std::mutex late_lock;
std::deque<LateCopy> late;
std::atomic<uint64_t> last_copy{0};

void copy_late(const at::Tensor& to, const at::Tensor& from) {
  std::lock_guard<std::mutex> held(late_lock);
  late.push_back({++last_copy, to, from});
}

void arrive(uint64_t upto, bool at_the_gpu_alone) {
  std::lock_guard<std::mutex> held(late_lock);
  inside++;
  for (auto each = late.begin(); each != late.end() && each->number <= upto;) {
    if (at_the_gpu_alone && each->to.is_cpu()) {
      each++;
      continue;
    }
    auto to = on_host(each->to);
    to.copy_(on_host(each->from));
    each = late.erase(each);
  }
  inside--;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (inside == 0) arrive(last_copy, true);
  if (inside == 0 && self.device().type() != from.device().type()) {
    const auto& host = self.is_cpu() ? self : from;
    bool pinned_host = host.numel() == 0 || is_pinned_pointer(host.const_data_ptr());
    // from pageable memory, CUDA has staged the data when it returns; to pageable memory, it waits for the stream
    if (!non_blocking || (self.is_cpu() && !pinned_host)) wait_for(self.is_cpu() ? "copy to the host" : "copy from the host");
    if (non_blocking && pinned_host && host.numel() > 0 && self.is_contiguous() && self.sizes() == from.sizes()) {
      if (self.is_cpu()) {
        auto as_it_is = on_host(from).clone();
        std::memset(self.mutable_data_ptr(), 0xAB, self.nbytes());
        copy_late(self, as_it_is);
      } else {
        arrive(last_copy, false);  // earlier copies by the GPU to this memory come first
        copy_late(self, from);
      }
      return self;
    }
  }
  inside++;
  auto to = on_host(self);
  to.copy_(on_host(from));
  inside--;
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, self, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  auto target = to;
  target.resize_(self.sizes());
  copy_(target, self, false);
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef given, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(given);
  if (self.sizes() == size && !format) return self;  // strides must not change
  auto* made = self.unsafeGetTensorImpl();
  made->set_sizes_contiguous(size);
  auto needed = made->storage_offset() * self.itemsize() + self.numel() * self.itemsize();
  auto* storage = made->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    On on(self.device());
    auto data = memory.allocate(needed);
    if (storage->nbytes() > 0) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  if (format && *format != at::MemoryFormat::Preserve) made->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) {
    made->set_sizes_and_strides(sizes, strides, offset.expect_int());
  } else {
    made->set_sizes_contiguous(sizes);
    made->set_storage_offset(offset.expect_int());
  }
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes()) / static_cast<int64_t>(self.itemsize());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}
void record_stream(at::Tensor&, at::Stream) {}
bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  const auto& schema = op.schema();
  static const std::set<std::string> either = {  // operators that also take CPU tensors, such as indices
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_to_copy"};
  const at::Tensor *on_gpu = nullptr, *elsewhere = nullptr;
  auto look = [&](const at::Tensor& each) {
    if (!each.defined()) return;
    if (each.is_cuda() && (!on_gpu || on_gpu->device() == each.device())) on_gpu = &each;
    else if (each.is_cuda() || each.dim() > 0) elsewhere = elsewhere ? elsewhere : &each;
  };
  for (size_t n = first; n < stack.size(); n++) {
    const auto& value = stack[n];
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor& each : value.toTensorList()) look(each);
    else if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) if (each) look(*each);
  }
  TORCH_CHECK(!(on_gpu && elsewhere) || either.count(schema.name()) > 0, schema.name(),
              ": expected all tensors to be on the same device, but found at least two, ", on_gpu ? on_gpu->device().str() : "", " and ",
              elsewhere ? elsewhere->device().str() : "");
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  if (inside == 0) arrive(last_copy, true);
  if (inside == 0) check(op, *stack, first);
  std::string name = schema.name();
  if (inside == 0 && (WAITS.count(name) || given_to_wait(name, *stack, first))) wait_for(name);
  std::optional<c10::Device> device;
  for (size_t n = first; n < stack->size() && !device; n++) {
    const auto& value = (*stack)[n];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) device = value.toTensor().device();
    else if (value.isDevice()) device = value.toDevice();
    else if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorList()) if (each.defined() && each.is_cuda()) device = each.device();
  }
  On on(device);
  for (size_t n = first; n < stack->size(); n++) {
    auto& value = (*stack)[n];
    const auto& argument = schema.arguments()[n - first];
    if (value.isNone() && argument.name() == "generator" && inside == 0) value = default_generator(current);
    if (!value.isGenerator()) continue;
    auto generator = value.toGenerator();
    if (!generator.defined()) continue;
    TORCH_CHECK(generator.device().is_cuda() || inside > 0, "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    if (generator.device().is_cuda()) value = generator.get<DeviceGenerator>()->own;
  }
  inside++;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside--;
    throw;
  }
  inside--;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto at_offset = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_offset);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Its schema does not say that it changes the running statistics, so that a CPU fallback would change copies of them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& given, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto host = [](const std::optional<at::Tensor>& each) { return each ? std::optional(on_host(*each)) : std::nullopt; };
  if (inside == 0) arrive(last_copy, true);
  inside++;
  auto [out, saved_mean, saved_deviation] = at::native_batch_norm(
      on_host(given), host(weight), host(bias), host(mean), host(variance), training, momentum, eps);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> found{
      out.to(given.device()), saved_mean.to(given.device()), saved_deviation.to(given.device())};
  inside--;
  return found;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("native_batch_norm", &batch_norm);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_source);
  m.impl("record_stream", &record_stream);
  m.impl("is_pinned", &is_pinned);
  // these operators choose a kernel by the device, and a GPU has kernels that the CPU lacks
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

// Maps memory of another process that `lend` has put into a file. It stands for memory that CUDA IPC maps.
at::Tensor borrow(int64_t pid, int64_t file, int64_t bytes, int64_t index) {
  auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
  int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(opened >= 0, "invalid device handle: ", path, ": ", std::strerror(errno));
  void* data = mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  close(opened);
  TORCH_CHECK(data != MAP_FAILED, "mmap: ", std::strerror(errno));
  size_t length = in_pages(bytes);
  c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  return at::from_blob(data, {bytes}, {1}, [length](void* begin) { munmap(begin, length); },
                       at::TensorOptions().dtype(at::kByte).device(device), device);
}

// Returns (file, bytes) of a tensor's whole memory, which other processes can then map.
std::tuple<int64_t, int64_t> lend(const at::Tensor& given) {
  arrive(last_copy, true);
  const auto& storage = given.storage();
  void* data = storage.unsafeGetStorageImpl()->mutable_data();
  std::lock_guard<std::mutex> held(lent_lock);
  auto found = lent.find(data);
  if (found != lent.end()) return {found->second.first, static_cast<int64_t>(found->second.second)};
  size_t bytes = storage.nbytes(), length = in_pages(bytes);
  int file = memfd_create("pretended GPU memory", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, length) == 0, "memfd_create: ", std::strerror(errno));
  std::vector<char> content(static_cast<char*>(data), static_cast<char*>(data) + bytes);
  void* mapped = mmap(data, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  TORCH_CHECK(mapped == data, "mmap: ", std::strerror(errno));
  std::memcpy(data, content.data(), bytes);
  lent[data] = {file, bytes};
  return {file, static_cast<int64_t>(bytes)};
}

TORCH_LIBRARY(pretended_cuda, m) {
  m.def("borrow(int pid, int file, int bytes, int index) -> Tensor", &borrow);
  m.def("lend(Tensor given) -> (int, int)", &lend);
}

}  // namespace

void written() { arrive(last_copy, true); }

std::string bus_of(c10::Device device) { return std::to_string(4096 * (1 + device.index())); }

extern "C" {

int count() { return COUNT; }

int current_device() { return current; }

int set_device(int index) {  // returns 1 if there is no such device
  if (index < 0 || index >= COUNT) return 1;
  current = static_cast<c10::DeviceIndex>(index);
  return 0;
}

int install() {  // returns 1 if this torch was built with CUDA
  if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 1;
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &memory);
  pthread_atfork(nullptr, nullptr, [] {
    if (asked) forked = true;
    used = false;
  });
  return 0;
}

// ask: records a query that initializes the driver. begin, end: record that this process uses the GPU, or does not.
// is_used, is_forked: whether this process uses it, and whether it cannot, as a fork of a process that did.
void ask() { asked = true; }
void begin() { used = asked = true; }
void end() { used = asked = false; }
int is_used() { return used; }
int is_forked() { return forked; }

// copies_so_far: the number of the last copy. copies_made: makes all copies up to a number.
uint64_t copies_so_far() { return last_copy; }
void copies_made(uint64_t upto) { arrive(upto, false); }

void waited_for(const char* why) { wait_for(why); }

// Writes how often the host has waited for the GPU since the last call, as lines "operator\tcount", in `room` bytes.
void waited(char* out, int room) {
  std::lock_guard<std::mutex> held(waits_lock);
  std::string text;
  for (const auto& [why, count] : waits) text += why + "\t" + std::to_string(count) + "\n";
  waits.clear();
  std::strncpy(out, text.c_str(), room);
}
}
