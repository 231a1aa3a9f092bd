#include "threads_cpu.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace ostinato {
namespace {

// The time for which a thread without work looks for some before it sleeps. It is longer than Python takes from one segment
// of a method to the next, and longer than a GPU takes for its share of a layer of a prompt. Waking a thread costs 30 to 50
// us.
constexpr auto PATIENCE = std::chrono::microseconds(1000);
// After this time a thread that looks for work offers its processor to other threads: on a busy machine, the thread with the
// work may be waiting for that processor.
constexpr auto YIELD_AFTER = std::chrono::microseconds(5);
constexpr int YIELD_AFTER_SPINS = 500;

// The physical core of a processor, as text. The hardware threads of one core have the same text.
std::string core_of(int cpu) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  std::string siblings;
  return std::getline(file, siblings) ? siblings : std::to_string(cpu);
}

// The container's limit of processor time, in cores; 0 if there is no limit.
int quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string limit;
  double period = 0;
  if (!(file >> limit >> period) || limit == "max" || period <= 0) return 0;
  return std::max(1, int(std::atof(limit.c_str()) / period));
}

int physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return int(std::max(1u, std::thread::hardware_concurrency()));
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cores.insert(core_of(cpu));
  int found = std::max<int>(1, cores.size()), limit = quota();
  return limit ? std::min(found, limit) : found;
}

int wanted_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  int number = text ? std::atoi(text) : 0;
  return number > 0 ? number : physical_cores();
}

// The number of a job's pieces, and the number of the next free piece, in one word. So a thread that takes a number learns at
// the same time whether it is a piece of the current job.
using Ticket = uint64_t;
constexpr int COUNT_SHIFT = 24;
constexpr Ticket FIELD = (Ticket(1) << 24) - 1;
constexpr int64_t MAX_PIECES = int64_t(1) << 23;

int64_t next_of(Ticket ticket) { return int64_t(ticket & FIELD); }
int64_t count_of(Ticket ticket) { return int64_t(ticket >> COUNT_SHIFT & FIELD); }

class Pool {
 public:
  Pool() {
    // The threads are never joined: at the process's end they sleep. If the system gives no more threads, fewer do the work.
    try {
      for (int wanted = wanted_threads(); threads_ < wanted; ++threads_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  int threads() const { return threads_; }

  // Called in a forked process, which has none of the threads.
  void forget_threads() { threads_ = 1; }

  void run(int64_t count, int64_t pieces, Task task, const void* context) {
    std::unique_lock<std::mutex> mine(running_, std::defer_lock);
    pieces = std::min({pieces, count, MAX_PIECES});
    if (pieces == 1 || threads_ == 1 || working_ || !mine.try_lock()) return task(context, 0, count);
    task_ = task;
    context_ = context;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(Ticket(pieces) << COUNT_SHIFT, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(sleeping_);
      wake_.notify_all();
    }
    take_pieces();
    // Other threads are working on the remaining pieces.
    for (int spins = 0; done_.load(std::memory_order_acquire) < pieces; ++spins) {
      _mm_pause();
      if (spins > YIELD_AFTER_SPINS) std::this_thread::yield();
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void take_pieces() {
    int64_t taken = 0;
    working_ = true;
    for (;;) {
      Ticket ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      int64_t piece = next_of(ticket), pieces = count_of(ticket);
      if (piece >= pieces) break;
      // The job cannot end before this piece is counted below, so its task and context stay valid.
      try {
        task_(context_, piece * count_ / pieces, (piece + 1) * count_ / pieces);
      } catch (...) {
        std::lock_guard<std::mutex> lock(failing_);
        failure_ = std::current_exception();
      }
      ++taken;
    }
    working_ = false;
    if (taken) done_.fetch_add(taken, std::memory_order_acq_rel);
  }

  bool has_pieces() const {
    Ticket ticket = ticket_.load(std::memory_order_seq_cst);
    return next_of(ticket) < count_of(ticket);
  }

  void work() {
    for (;;) {
      auto begin = std::chrono::steady_clock::now();
      while (!has_pieces()) {
        for (int i = 0; i < 32 && !has_pieces(); ++i) _mm_pause();
        auto waited = std::chrono::steady_clock::now() - begin;
        if (waited > PATIENCE)
          sleep();
        else if (waited > YIELD_AFTER)
          std::this_thread::yield();
      }
      take_pieces();
    }
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(sleeping_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [this] { return has_pieces(); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Whether this thread is working on a piece.
  static inline thread_local bool working_ = false;

  int threads_ = 1;
  std::mutex running_, failing_;
  std::exception_ptr failure_;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<Ticket> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleeping_;
  std::condition_variable wake_;
};

Pool& pool() {
  // Never destroyed: the pool's threads may outlive static objects.
  static Pool* made = [] {
    auto* fresh = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool().forget_threads(); });
    return fresh;
  }();
  return *made;
}

}  // namespace

int thread_count() { return pool().threads(); }

void run_tasks(int64_t count, int64_t pieces, Task task, const void* context) {
  if (count > 0) pool().run(count, pieces, task, context);
}

}  // namespace ostinato
