//! Buffers that are used again: a pool for the tasks of a parallel loop, and a buffer that grows.
//!
//! A loop has more tasks than threads. The pool holds as many buffers as tasks ever ran at the same time, so never more than
//! threads; a memory plan can count on that. (rayon's `for_each_init` makes a buffer every time it splits the loop.)

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers that no task is using.
#[derive(Debug, Default)]
pub struct BufferPool<T>(Mutex<Vec<T>>);

impl<T> BufferPool<T> {
    /// An empty pool.
    pub fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Lends a buffer to `work`; makes one with `new` if none is idle. A buffer is lost when `work` panics.
    pub fn lend<R>(&self, new: impl FnOnce() -> T, work: impl FnOnce(&mut T) -> R) -> R {
        // The lock is not held while a buffer is made or used.
        let idle = self.idle().pop();
        let mut buffer = idle.unwrap_or_else(new);
        let result = work(&mut buffer);
        self.idle().push(buffer);
        result
    }

    /// Returns all buffers.
    pub fn into_inner(self) -> Vec<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The list holds only buffers that were given back, so a panic of a thread leaves it whole.
    fn idle(&self) -> MutexGuard<'_, Vec<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the first `length` elements of a buffer, with unspecified content. The old buffer is freed before a larger buffer is allocated.
pub(super) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) -> &mut [T] {
    if buffer.len() < length {
        *buffer = Vec::new();
        *buffer = vec![T::default(); length];
    }
    &mut buffer[..length]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn there_are_no_more_than_threads_and_each_serves_one_task_at_a_time() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(3);
        let pool = BufferPool::new();
        let tasks = 200;
        threads.build().unwrap().install(|| {
            (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
                pool.lend(Vec::new, |done| {
                    done.push(task);
                    std::thread::yield_now();
                });
            });
        });
        let all = pool.into_inner();
        assert!((1..=3).contains(&all.len()), "{}", all.len());
        let mut done = all.concat();
        done.sort_unstable();
        assert_eq!(done, (0..tasks).collect::<Vec<_>>());
    }

    #[test]
    fn what_comes_back_is_lent_again() {
        let pool = BufferPool::new();
        assert_eq!(pool.lend(|| 1, |one| std::mem::replace(one, 2)), 1);
        assert_eq!(pool.lend(|| panic!("there is one"), |one| *one), 2);
        // The only buffer is in use, so a second buffer is made.
        pool.lend(|| panic!("there is one"), |_| pool.lend(|| 3, |_| ()));
        assert_eq!(pool.into_inner().len(), 2);
    }
}
