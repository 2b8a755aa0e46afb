/* table.c: the lock round the library's tables, and what fork does to it.
 *
 * State: one mutex. SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "table.h"

#include <pthread.h>

static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    (void)pthread_mutex_lock(&table);
}

static void after_fork(void)
{
    (void)pthread_mutex_unlock(&table);
}

static void watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork, after_fork);
}

void sim_table_lock(void)
{
    (void)pthread_once(&fork_once, watch_forks);
    (void)pthread_mutex_lock(&table);
}

void sim_table_unlock(void)
{
    (void)pthread_mutex_unlock(&table);
}
