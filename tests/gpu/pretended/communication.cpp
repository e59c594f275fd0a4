// Communication between processes with pretended GPUs: what builds of torch with CUDA have of NCCL and of gloo.
//
// A GPU's memory is the host's, and gloo transfers it. NCCL's operations run in order on a thread of their own, as on
// a stream: they read and write tensors some time after they were started, and ranks that start them in different
// orders hang. Refused is what NCCL refuses: two ranks on one GPU; tensors that are on the CPU, not contiguous or of a
// type that NCCL lacks; and an operation of only some ranks that would make a communicator. Gloo's collectives take GPU
// tensors; its send and recv refuse them, as the system finds no host memory at their addresses.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

at::Tensor on_host(const at::Tensor& given);  // device.cpp
std::string bus_of(c10::Device device);
void written();  // the operations that the GPU was asked for are done

namespace {

using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Moved = std::function<std::vector<WorkPtr>(Backend&)>;  // starts operations of gloo

Tensors on_host(const Tensors& given) {
  Tensors made;
  for (const auto& each : given) made.push_back(::on_host(each));
  return made;
}

struct Queued final : Work {
  Queued(int rank, OpType type) : Work(rank, type) {}
  void over(std::exception_ptr error) { finish(error); }
  bool isCompleted() override { std::lock_guard<std::mutex> held(mutex_); return completed_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {  // a real one makes the stream wait and not the host
    std::unique_lock<std::mutex> held(mutex_);
    if (timeout <= std::chrono::milliseconds::zero()) {
      cv_.wait(held, [&] { return completed_; });
    } else {
      TORCH_CHECK(cv_.wait_for(held, timeout, [&] { return completed_; }), "an operation took longer than its time");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
};

struct Begun final : Work {  // an operation of gloo; ranks start those for GPU and CPU tensors in one common order
  Begun(int rank, OpType type, WorkPtr work, Tensors tensors)
      : Work(rank, type), work_(std::move(work)), tensors_(std::move(tensors)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  WorkPtr work_;
  Tensors tensors_;
};

struct Line {  // runs the operations of one communicator one after the other
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::pair<Moved, c10::intrusive_ptr<Queued>>> jobs;
  bool ended = false, running = false;
  c10::intrusive_ptr<Backend> gloo;

  void run() {
    std::unique_lock<std::mutex> held(lock);
    while (true) {
      changed.wait(held, [&] { return ended || !jobs.empty(); });
      if (jobs.empty()) break;
      auto [job, work] = std::move(jobs.front());
      jobs.pop_front();
      held.unlock();
      std::exception_ptr error;
      try {
        for (auto& each : job(*gloo)) each->wait(std::chrono::hours(24));
      } catch (...) {
        error = std::current_exception();
      }
      job = nullptr;  // frees the tensors before the waiters are notified
      work->over(error);
      work.reset();
      held.lock();
    }
    running = false;
    changed.notify_all();
  }
};

void check(const Tensors& given, bool nccl) {
  for (const auto& each : given) {
    TORCH_CHECK(each.is_cuda(), "Tensors must be CUDA and dense");
    TORCH_CHECK(each.is_contiguous(each.suggest_memory_format()), "Tensors must be contiguous");
    auto type = each.scalar_type();
    TORCH_CHECK(!nccl || !(type == at::kShort || type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64),
                "Input tensor data type is not supported for NCCL process group: ", type);
  }
}

class OnGpu final : public Backend {
 public:
  OnGpu(c10::intrusive_ptr<Backend> gloo, bool nccl)
      : Backend(gloo->getRank(), gloo->getSize()), nccl_(nccl), line_(std::make_shared<Line>()) {
    line_->gloo = std::move(gloo);
    line_->running = true;
    std::thread([line = line_] { line->run(); }).detach();
  }
  ~OnGpu() override { end(false); }

  const std::string getBackendName() const override { return nccl_ ? "nccl" : "gloo"; }
  bool supportsCoalescing() const override { return nccl_; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(at::Device device) override { connect(device); }
  void shutdown() override { end(true); }
  void abort() override {
    std::unique_lock<std::mutex> held(line_->lock);
    for (auto& [job, work] : line_->jobs) {
      work->over(std::make_exception_ptr(std::runtime_error("NCCL communicator was aborted")));
    }
    line_->jobs.clear();
    line_->ended = true;
    line_->changed.notify_all();
  }

  WorkPtr broadcast(Tensors& t, const BroadcastOptions& o) override {
    return asked(OpType::BROADCAST, t, [h = on_host(t), o](Backend& g) mutable { return one(g.broadcast(h, o)); });
  }
  WorkPtr allreduce(Tensors& t, const AllreduceOptions& o) override {
    return asked(OpType::ALLREDUCE, t, [h = on_host(t), o](Backend& g) mutable { return one(g.allreduce(h, o)); });
  }
  WorkPtr reduce(Tensors& t, const ReduceOptions& o) override {
    return asked(OpType::REDUCE, t, [h = on_host(t), o](Backend& g) mutable { return one(g.reduce(h, o)); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& o) override {
    std::vector<Tensors> to{on_host(out.at(0))};
    auto all = out[0];
    all.push_back(in.at(0));
    return asked(OpType::ALLGATHER, all,
                 [to, h = on_host(in), o](Backend& g) mutable { return one(g.allgather(to, h, o)); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override {
    return asked(OpType::_ALLGATHER_BASE, {out, in}, [to = ::on_host(out), h = ::on_host(in), o](Backend& g) mutable {
      return one(g._allgather_base(to, h, o));
    });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const ReduceScatterOptions& o) override {
    std::vector<Tensors> given{on_host(in.at(0))};
    auto all = in[0];
    all.push_back(out.at(0));
    return asked(OpType::REDUCE_SCATTER, all,
                 [given, h = on_host(out), o](Backend& g) mutable { return one(g.reduce_scatter(h, given, o)); });
  }
  WorkPtr barrier(const BarrierOptions&) override {
    Tensors t{at::zeros({1}, at::device(getBoundDeviceId().value_or(c10::Device(at::kCUDA))))};
    return allreduce(t, AllreduceOptions());
  }

  WorkPtr send(Tensors& t, int peer, int) override { return between(OpType::SEND, t, peer); }
  WorkPtr recv(Tensors& t, int peer, int) override { return between(OpType::RECV, t, peer); }
  void startCoalescing() override {
    TORCH_CHECK(!batch_, "a batch is under way");
    batch_ = std::make_shared<Batch>();
  }
  WorkPtr endCoalescing() override {
    auto batch = std::move(batch_);
    batch_.reset();
    TORCH_CHECK(batch, "no batch is under way");
    Tensors all;
    for (const auto& each : *batch) all.push_back(each.tensor);
    return asked(OpType::COALESCED, all, [batch, own = getRank()](Backend& g) { return exchanged(*batch, g, own); });
  }

 private:
  struct Piece {
    bool out;
    at::Tensor tensor;
    int peer;
  };
  using Batch = std::vector<Piece>;

  static std::vector<WorkPtr> one(WorkPtr work) { return {std::move(work)}; }

  static std::vector<WorkPtr> exchanged(const Batch& batch, Backend& gloo, int own) {
    std::vector<WorkPtr> works;
    std::deque<at::Tensor> to_self;
    for (const auto& each : batch)
      if (each.out && each.peer == own) to_self.push_back(each.tensor);
    for (const auto& each : batch) {
      Tensors h{::on_host(each.tensor)};
      if (each.peer != own) {
        works.push_back(each.out ? gloo.send(h, each.peer, 0) : gloo.recv(h, each.peer, 0));
      } else if (!each.out) {
        TORCH_CHECK(!to_self.empty(), "a rank receives of itself what it does not send");
        h[0].copy_(::on_host(to_self.front()));
        to_self.pop_front();
      }
    }
    return works;
  }

  WorkPtr between(OpType type, Tensors& t, int peer) {
    check(t, nccl_);
    TORCH_CHECK(nccl_, "[gloo/transport/tcp/pair.cc] writev [127.0.0.1]: Bad address");
    Piece piece{type == OpType::SEND, t.at(0), peer};
    if (batch_) {
      batch_->push_back(piece);
      return c10::make_intrusive<Queued>(getRank(), type);
    }
    TORCH_CHECK(connected_, "the pretended NCCL makes no communicators of pairs: use a batch");
    return asked(type, t, [piece, own = getRank()](Backend& g) { return exchanged({piece}, g, own); });
  }

  void connect(at::Device device) {
    if (connected_ || !nccl_) return;
    const std::string own = bus_of(device);
    auto here = at::zeros({64}, at::kByte);
    std::memcpy(here.data_ptr(), own.data(), std::min<size_t>(own.size(), 64));
    std::vector<Tensors> found(1);
    for (int n = 0; n < getSize(); n++) found[0].push_back(at::zeros_like(here));
    Tensors given{here};
    line_->gloo->allgather(found, given, AllgatherOptions())->wait(kNoTimeout);
    for (int a = 0; a < getSize(); a++)
      for (int b = a + 1; b < getSize(); b++)
        TORCH_CHECK_WITH(DistBackendError, !found[0][a].equal(found[0][b]),
                         "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)\n"
                         "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                         "Duplicate GPU detected : rank ", a, " and rank ", b, " both on CUDA device ", own);
    connected_ = true;
  }

  WorkPtr asked(OpType type, const Tensors& tensors, Moved job) {
    check(tensors, nccl_);
    if (!tensors.empty()) connect(tensors[0].device());
    written();
    if (!nccl_) return c10::make_intrusive<Begun>(getRank(), type, job(*line_->gloo).at(0), tensors);
    auto work = c10::make_intrusive<Queued>(getRank(), type);
    Moved kept = [tensors, job = std::move(job)](Backend& gloo) { return job(gloo); };
    std::lock_guard<std::mutex> held(line_->lock);
    TORCH_CHECK(!line_->ended, "NCCL communicator was aborted");
    line_->jobs.emplace_back(std::move(kept), work);
    line_->changed.notify_all();
    return work;
  }

  void end(bool wait) {
    std::unique_lock<std::mutex> held(line_->lock);
    line_->ended = true;
    line_->changed.notify_all();
    if (wait) line_->changed.wait_for(held, std::chrono::seconds(10), [&] { return !line_->running; });
  }

  bool nccl_, connected_ = false;
  std::shared_ptr<Batch> batch_;
  std::shared_ptr<Line> line_;
};

// Adds a backend for GPUs to a group that has gloo for the CPU.
void join(const c10::intrusive_ptr<ProcessGroup>& group, bool nccl) {
  auto type = nccl ? ProcessGroup::BackendType::NCCL : ProcessGroup::BackendType::CUSTOM;
  group->setBackend(at::kCUDA, type, c10::make_intrusive<OnGpu>(group->getBackend(at::kCPU), nccl));
}

TORCH_LIBRARY_FRAGMENT(pretended_cuda, m) {
  m.def("join(__torch__.torch.classes.c10d.ProcessGroup group, bool nccl) -> ()", &join);
}

}  // namespace
