//! What tasks of a parallel loop take turns with: buffers, counters.
//!
//! A loop has more tasks than threads. Of what a task works on there are as many as tasks ever worked at the same time, so never more
//! than threads, whichever thread takes which task; a memory plan can count on that. (rayon's `for_each_init` makes one for every
//! time it splits the loop.)

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Those that no task is using.
#[derive(Debug, Default)]
pub struct Lent<T>(Mutex<Vec<T>>);

impl<T> Lent<T> {
    /// None so far.
    pub fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Lends one to `work`, a new one where all others are in use. Where `work` panics it is not taken back.
    pub fn lend<R>(&self, new: impl FnOnce() -> T, work: impl FnOnce(&mut T) -> R) -> R {
        // The lock is not held while one is made or worked with.
        let idle = self.idle().pop();
        let mut one = idle.unwrap_or_else(new);
        let result = work(&mut one);
        self.idle().push(one);
        result
    }

    /// All of them.
    pub fn into_inner(self) -> Vec<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread that panicked left none of them half-way: only whole ones are in the list.
    fn idle(&self) -> MutexGuard<'_, Vec<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn there_are_no_more_than_threads_and_each_serves_one_task_at_a_time() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3);
        let lent = Lent::new();
        let tasks = 200;
        pool.build().unwrap().install(|| {
            (0..tasks).into_par_iter().with_max_len(1).for_each(|task| {
                lent.lend(Vec::new, |done| {
                    done.push(task);
                    std::thread::yield_now();
                });
            });
        });
        let all = lent.into_inner();
        assert!((1..=3).contains(&all.len()), "{}", all.len());
        let mut done = all.concat();
        done.sort_unstable();
        assert_eq!(done, (0..tasks).collect::<Vec<_>>());
    }

    #[test]
    fn what_comes_back_is_lent_again() {
        let lent = Lent::new();
        assert_eq!(lent.lend(|| 1, |one| std::mem::replace(one, 2)), 1);
        assert_eq!(lent.lend(|| panic!("there is one"), |one| *one), 2);
        // One in use: another is made.
        lent.lend(|| panic!("there is one"), |_| lent.lend(|| 3, |_| ()));
        assert_eq!(lent.into_inner().len(), 2);
    }
}
