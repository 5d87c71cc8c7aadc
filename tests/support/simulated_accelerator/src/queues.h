// Streams of a simulated accelerator. Each is a thread that executes tasks in order, and may be late or lazy.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int STREAMS = 32;  // streams of each device; the first is the default stream
constexpr int MOST_DEVICES = 8;

// Delays of streams: [0] of default streams, [1] of all others.
struct Delay {
  std::atomic<int64_t> delay_us{0};  // the most microseconds by which a task is late
  std::atomic<bool> is_lazy{false};  // True if a task starts only when somebody waits for it
};
inline Delay delays[2];

using Time = std::chrono::steady_clock::time_point;

class Queue {
 public:
  Queue(int device, int index)
      : dice_(device * STREAMS + index), delay_(delays[index != 0]) {
    std::thread([this] { run(); }).detach();
  }

  // Adds a task; returns its serial number.
  uint64_t give(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(work));
    changed_.notify_all();
    return ++given_;
  }

  uint64_t given() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_;
  }

  bool is_done(uint64_t serial) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= serial;
  }

  // Waits, on behalf of the host or of another stream; raises the error of a task up to there.
  void wait(uint64_t serial) {
    std::unique_lock<std::mutex> lock(mutex_);
    demanded_ = std::max(demanded_, serial);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= serial; });
    raise(serial);
  }

  bool query(uint64_t serial) {  // like `is_done`, but raises the error of a task up to there
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_ < serial) return false;
    raise(serial);
    return true;
  }

  void forgive() {  // tasks given from now on are not affected by earlier errors
    {
      std::lock_guard<std::mutex> lock(mutex_);
      forgiven_ = given_;
    }
    give([] {});  // a wait for all that was given is a later wait, too
  }

  void wake() {  // after a change of the delays
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

 private:
  void raise(uint64_t serial) const {
    for (const auto& [failed, error] : errors_)
      if (failed <= serial && (failed > forgiven_ || serial <= forgiven_))
        throw c10::AcceleratorError(
            {__func__, __FILE__, __LINE__}, 1, "simulated accelerator, in earlier work: " + error);
  }

  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::AutoGradMode no_gradients(false);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty() && (!delay_.is_lazy || demanded_ > done_); });
      auto work = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (const int64_t most = delay_.delay_us)
        std::this_thread::sleep_for(std::chrono::microseconds(dice_() % most));
      std::string error;
      try {
        work();
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
      work = nullptr;
      lock.lock();
      ++done_;
      if (!error.empty()) errors_.emplace_back(done_, error);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t given_ = 0, done_ = 0, demanded_ = 0, forgiven_ = 0;
  std::vector<std::pair<uint64_t, std::string>> errors_;  // of tasks, by their serial numbers
  std::minstd_rand dice_;
  Delay& delay_;
};

// The point of an event in a stream, and the time at which the stream reached it.
struct Mark {
  Queue* queue;
  uint64_t serial;
  std::shared_ptr<Time> reached;
};

inline Mark mark(Queue& queue) {
  auto reached = std::make_shared<Time>();
  const uint64_t serial = queue.give([reached] { *reached = std::chrono::steady_clock::now(); });
  return {&queue, serial, reached};
}

inline void wait_for(Queue& queue, const Mark& mark) {
  if (&queue != mark.queue) queue.give([mark] { mark.queue->wait(mark.serial); });
}

}  // namespace simulated
