/* Preloaded into servers, agents and jobs: adds an offset, read from a file, to the wall clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *seconds;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_offset(void) {
    const char *prefix = getenv("CHAOS_CLOCK");
    char path[4096];
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (!prefix) return;
    /* Hosts have a clock of their own. */
    snprintf(path, sizeof path, "%s.%s", prefix, getenv("TPUFLEET_SLICE") ? "hosts" : "servers");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) seconds = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real_gettime ? real_gettime(clock, now) : -1;
    if (result == 0 && seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *seconds;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *result, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return 0;
}
