// A small pool of threads: made at the first call that needs it, and again in a forked child. It serves one call at a time. A
// call that comes while it is busy, or from one of its own threads, runs on its caller's thread alone: so there are never more
// threads at work than callers and pool.
#include "doors/pool.h"

#if defined(ANYMAX_NO_THREADS)

extern "C" int anymax_pool_run(int64_t begin, int64_t end, int64_t, anymax_task task, void *context) {
    task(begin, end, context);
    return 0;
}
extern "C" int anymax_get_num_threads(void) { return 1; }
extern "C" void anymax_set_num_threads(int) {}

#else

#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(_WIN32)
#include <process.h>
#include <windows.h>
#else
#include <pthread.h>
#endif

namespace {

// Starts a thread that runs body(argument); false where the system refuses one (a limit on processes or memory). std::thread
// reports that by an exception, and this library is compiled without exceptions.
template <void (*body)(void *)>
bool start(void *argument) {
#if defined(_WIN32)
    const uintptr_t thread = _beginthreadex(
        nullptr, 0,
        [](void *a) -> unsigned {
            body(a);
            return 0;
        },
        argument, 0, nullptr);
    if (thread) CloseHandle((HANDLE)thread);
    return thread != 0;
#else
    pthread_t thread;
    const auto run = [](void *a) -> void * {
        body(a);
        return nullptr;
    };
    if (pthread_create(&thread, nullptr, run, argument)) return false;
    pthread_detach(thread);
    return true;
#endif
}

int cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int count = CPU_COUNT(&set);
        if (count > 0) return count;
    }
#endif
    int count = (int)std::thread::hardware_concurrency();
    return count > 0 ? count : 1;
}

int initial() {
    for (const char *name : {"ANYMAX_NUM_THREADS", "OMP_NUM_THREADS"}) {
        const char *text = getenv(name);
        int count = text ? atoi(text) : 0;  // of a list "4,2", the first level
        if (count > 0) return count < 1024 ? count : 1024;
    }
    return cores();
}

constexpr int SPIN = 100;  // microseconds of waiting before a thread sleeps

struct Job {
    anymax_task task = nullptr;
    void *context = nullptr;
    int64_t end = 0, grain = 1;
    std::atomic<int64_t> next{0};

    void work() {
        for (;;) {
            int64_t b = next.fetch_add(grain, std::memory_order_relaxed);
            if (b >= end) return;
            task(b, b + grain < end ? b + grain : end, context);
        }
    }
};

// Waits a short while without sleeping: calls come in series, and to be woken takes longer than a small call does. Other
// threads may have the core meanwhile.
template <class F>
void spin_until(F ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN);
    while (!ready() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

thread_local bool inside = false;

struct Pool {
    std::mutex one_call, state;
    std::condition_variable wake, done;
    Job job;
    std::atomic<uint64_t> call_number{0};
    std::atomic<int> active{0}, begun{0};
    int needed = 0, made = 0;
    bool open =
        false;  // there may be work left; a thread that wakes after that sleeps again, and the caller does not wait for it

    void loop(int me) {
        inside = true;
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(state);
        for (;;) {
            lock.unlock();
            spin_until([&] { return call_number.load(std::memory_order_relaxed) != seen; });
            lock.lock();
            wake.wait(lock, [&] { return call_number != seen; });
            seen = call_number;
            if (!open || me >= needed) continue;
            active++;
            lock.unlock();
            job.work();
            lock.lock();
            if (--active == 0) done.notify_one();
        }
    }

    static void helper(void *pool) {
        Pool *p = (Pool *)pool;
        p->loop(p->begun.fetch_add(1));
    }

    // Where no thread can be started, those that there are and the caller do the work.
    void run(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context, int threads) {
        int helpers = threads - 1;
        while (made < helpers && start<helper>(this)) made++;
        job.task = task, job.context = context, job.end = end, job.grain = grain;
        job.next.store(begin, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(state);
            needed = helpers, open = true;
            call_number++;
        }
        wake.notify_all();
        inside = true;
        job.work();
        inside = false;
        spin_until([&] { return active.load(std::memory_order_relaxed) == 0; });
        std::unique_lock<std::mutex> lock(state);
        open = false;
        done.wait(lock, [&] { return active == 0; });
    }
};

std::atomic<int> limit{0};
std::atomic<Pool *> pool{nullptr};

#if !defined(_WIN32)
// A forked child has none of its parent's threads, and one of those may have held the pool's locks: the child leaves that pool
// and makes a new one.
void forget() {
    pool.store(nullptr);
    inside = false;
}
#endif

Pool *get() {
    Pool *p = pool.load();
    if (p) return p;
#if !defined(_WIN32)
    static std::atomic<bool> watched{false};
    if (!watched.exchange(true)) pthread_atfork(nullptr, nullptr, forget);
#endif
    Pool *made = new (std::nothrow) Pool;  // never deleted: its threads may outlive any order of destruction
    if (!made) return nullptr;
    if (pool.compare_exchange_strong(p, made)) return made;
    delete made;
    return p;
}

}  // namespace

extern "C" int anymax_get_num_threads(void) {
    int count = limit.load();
    if (count == 0) {
        count = initial();
        limit.store(count);
    }
    return count;
}

extern "C" void anymax_set_num_threads(int count) { limit.store(count < 1 ? 1 : count > 1024 ? 1024 : count); }

extern "C" int anymax_pool_run(int64_t begin, int64_t end, int64_t grain, anymax_task task, void *context) {
    if (grain < 1) grain = 1;
    int64_t parts = (end - begin + grain - 1) / grain;
    int threads = anymax_get_num_threads();
    if (threads > parts) threads = (int)parts;
    if (threads > 1 && !inside) {
        Pool *p = get();
        if (p && p->one_call.try_lock()) {
            p->run(begin, end, anymax_piece(end - begin, grain, threads), task, context, threads);
            p->one_call.unlock();
            return 0;
        }
    }
    task(begin, end, context);
    return 0;
}

#endif
