// Scratch memory of each thread, and the threads that run parts of a product.

#pragma once

#include <cstdint>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "amx_tiles.h"
#include "layer.h"

namespace {

// Work is divided into numbered parts, and each free thread takes the next one. The threads are torch's
// OpenMP threads if their runtime is known (GOMP_parallel, libgomp's ABI). A thread of our own would share a
// processor with one of torch's, which stays awake for its next product.
typedef void (*Work)(const void *context, int64_t part, float *scratch);
typedef void (*Team)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
Team team = nullptr;  // GOMP_parallel of the caller's OpenMP runtime, or null for the pool

bool has_short();

// Memory that grows to the largest size requested; null if the allocation failed.
struct ThreadScratch {
    float *memory = nullptr;  // aligned to 64 bytes
    int64_t size = 0;         // size of `memory` in floats
    ~ThreadScratch() { free(memory); }
    float *get(int64_t floats) {
        if (floats > size) {
            free(memory);
            memory = (float *)aligned_alloc(64, (size_t)up(floats, 16) * 4);
            size = memory ? floats : 0;
        }
        return memory;
    }
};
// scratch of each thread; a thread without memory leaves all parts to others, a caller computes nothing
thread_local ThreadScratch own_scratch;
// prepared activations of a caller; see hfq_scratch
thread_local ThreadScratch activation_scratch;
thread_local ThreadScratch order_scratch;   // channel orders of a caller, for sorted layers

// Numbered parts of one job, and the scratch that each thread needs.
struct Parts {
    Work work;            // computes one part
    const void *context;  // first argument of `work`
    int64_t count;        // number of parts
    int64_t floats;       // float32 of scratch per thread
};

HFQ_INLINE int64_t own_floats(bool is_sorted) {
    return is_sorted ? (TILED_SCRATCH + SORTED_SCRATCH) / 4 : has_short() ? TILED_SCRATCH / 4 : SCRATCH;
}

// Threads of this library, which sleep until there is work.
struct Pool {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards the fields below
    pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;   // held by the caller whose parts run
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;     // signals that `wanted` has grown
    pthread_cond_t done = PTHREAD_COND_INITIALIZER;     // signals that `active` is 0
    Parts parts = {};                                   // current work
    int64_t next = 0;                                   // number of the next part to take
    int threads = 0;                                    // threads started
    int wanted = 0;                                     // threads that may still start on `parts`
    int active = 0;                                     // threads at work
};
Pool *pool = nullptr;  // made on first use
pthread_once_t pool_once = PTHREAD_ONCE_INIT;

void take_parts(Pool *p, const Parts &parts) {
    float *scratch = own_scratch.get(parts.floats);
    KeptSubnormals here;
    if (!scratch) return;
    for (int64_t part; (part = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < parts.count;)
        parts.work(parts.context, part, scratch);
}

void *serve(void *argument) {
    Pool *p = (Pool *)argument;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (p->wanted == 0) pthread_cond_wait(&p->wake, &p->mutex);
        p->wanted--;
        __atomic_add_fetch(&p->active, 1, __ATOMIC_RELAXED);
        const Parts parts = p->parts;
        pthread_mutex_unlock(&p->mutex);
        take_parts(p, parts);
        pthread_mutex_lock(&p->mutex);
        if (__atomic_sub_fetch(&p->active, 1, __ATOMIC_RELAXED) == 0) pthread_cond_signal(&p->done);
    }
    return nullptr;
}

// called in the child of a fork, which has neither kind of threads
void forget_pool() { pool = new Pool, team = nullptr; }

void make_pool() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, forget_pool);
}

// Number of threads worth waking for this many products; the threads of a team are usually awake.
int worthwhile(int threads, int64_t products) {
    return (int)least(threads, 1 + products / (team ? 1 << 19 : 1 << 21));
}

// State of one call of the team. All its threads are always called, since a runtime ends the threads that a
// smaller call leaves over.
struct Shared {
    Parts parts;   // current work
    int64_t next;  // number of the next part to take
    int wanted;    // threads that may still start on `parts`
};

void take_shared(void *argument) {
    Shared *shared = (Shared *)argument;
    if (__atomic_load_n(&shared->wanted, __ATOMIC_RELAXED) <= 0) return;
    float *scratch = own_scratch.get(shared->parts.floats);
    KeptSubnormals here;
    if (!scratch || __atomic_fetch_sub(&shared->wanted, 1, __ATOMIC_RELAXED) <= 0) return;
    for (int64_t part; (part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->parts.count;)
        shared->parts.work(shared->parts.context, part, scratch);
}

// Waits a few microseconds for `flag` to become 0. Sleeping takes longer, since a virtual machine may return
// an idle processor to its host.
void spin_while(const int *flag) {
    for (int i = 0; i < 4000 && __atomic_load_n(flag, __ATOMIC_RELAXED); i++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
}

// Runs all parts in the pool of this library; the caller holds `busy`.
void run_in_pool(Pool *p, const Parts &parts, int threads) {
    pthread_mutex_lock(&p->mutex);
    while (p->threads < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve, p) != 0) break;
        pthread_detach(thread);
        p->threads++;
    }
    p->parts = parts;
    __atomic_store_n(&p->next, 0, __ATOMIC_RELAXED);
    p->wanted = (int)least(threads - 1, p->threads);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    take_parts(p, parts);
    spin_while(&p->active);
    pthread_mutex_lock(&p->mutex);
    p->wanted = 0;  // no other thread needs to start
    while (p->active) pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

// Runs all parts on up to `wanted` of `threads`, and returns when they are done. A second concurrent caller
// runs its parts alone. The caller must have its scratch already.
void run_parts(const Parts &parts, int threads, int wanted) {
    pthread_once(&pool_once, make_pool);
    Pool *p = pool;
    wanted = (int)least(wanted, parts.count);
    if (wanted <= 1 || pthread_mutex_trylock(&p->busy) != 0) {
        for (int64_t part = 0; part < parts.count; part++)
            parts.work(parts.context, part, own_scratch.get(parts.floats));
        return;
    }
    if (team) {
        Shared shared = {parts, 0, wanted};
        team(take_shared, &shared, (unsigned)threads, 0);
    } else {
        run_in_pool(p, parts, wanted);
    }
    pthread_mutex_unlock(&p->busy);
}

}  // namespace
