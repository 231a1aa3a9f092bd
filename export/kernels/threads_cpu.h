// The threads of all kernels in a process.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ostinato {

// How many threads work together, the caller's among them: as many as the process may use physical cores, or what
// OMP_NUM_THREADS says.
int thread_count();

using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run_tasks(int64_t count, int64_t pieces, Task task, const void* context);

// Calls work(0) to work(count - 1), in any order and on any thread, and returns when all are done. Threads take neighbours
// together, in `each` pieces per thread: one piece at a time, so that a thread that the system has set aside holds up nobody but
// its own piece, and none at all when it has not begun one. Taking a piece costs all threads a tenth of a microsecond.
// Whoever calls it from inside of such a call, or while another thread of the process is in one, works alone.
template <typename Work>
void parallel(int64_t count, const Work& work, int64_t each = 8) {
  auto task = [](const void* context, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) (*static_cast<const Work*>(context))(index);
  };
  run_tasks(count, each * thread_count(), task, &work);
}

}  // namespace ostinato
