//! Handlers of async closures: tasks, whose polls are jobs as requests are.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::calling::CallingHandler;
use super::{HandlerBase, HandlerError, OwedResponse, Request, RequestHandler, panicked, respond_or_fail, respond_with, text_of};
use crate::engine::EngineShared;
use crate::progress::{EngineEnv, HandlerClass, Job, JobKind, poll_task};
use crate::proto::{Incoming, Placed, RequestId};

/// The handler of an async closure.
pub(in crate::rpc) fn asynchronous<A, R, F, Fut>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = R> + Send + 'static,
{
    spawning(f, respond_with::<R>)
}

/// The handler of an async closure that may fail.
pub(in crate::rpc) fn fallible_async<A, R, E, F, Fut>(f: F) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    R: Serialize + 'static,
    E: Into<HandlerError>,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<R, E>> + Send + 'static,
{
    let respond = |response: &OwedResponse, outcome: std::thread::Result<Result<R, String>>| respond_or_fail(response, outcome);
    spawning(
        move |request, arguments: A| {
            let future = f(request, arguments);
            async move { future.await.map_err(text_of) }
        },
        respond,
    )
}

/// The handler of an async closure; `respond` sends what its future was ready with.
fn spawning<A, T, F, Fut>(f: F, respond: fn(&OwedResponse, std::thread::Result<T>)) -> impl RequestHandler
where
    A: DeserializeOwned + 'static,
    T: 'static,
    F: Fn(Request, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = T> + Send + 'static,
{
    // The first polls may be quick, and those that follow not.
    let class_of_woken = OnceLock::new();
    move |base: &HandlerBase, shared: &Arc<EngineShared>, incoming: Placed<Incoming<EngineEnv>>| {
        let mut slot = (None, None);
        base.decode::<A>(shared, incoming, &mut slot);
        let (Some(response), Some(arguments)) = slot else { return };
        let request = response.request.clone();
        let id = request.id();
        let called = shared.runtime.within(|| response.span.run(|| f(request, arguments)));
        let future = match called {
            Ok(future) => future,
            Err(panic) => {
                let status = panicked(&response.request, &*panic);
                return drop(response.refuse(status));
            }
        };
        let (runtime, engine, calls) = (shared.runtime.clone(), base.shared.clone(), base.side.calls.clone());
        let task = async move {
            let mut entry = None;
            let future = pin!(Some(future));
            let mut future = DroppedQuietly(future);
            let outcome = poll_fn(|context| {
                let _calling = CallingHandler::enter(calls.as_deref());
                let task = context.waker().data();
                let polled = poll_task(task, || runtime.within(|| response.span.run(|| future.poll(context))));
                match polled {
                    Ok(Poll::Pending) => {
                        entry.get_or_insert_with(|| TaskEntry { engine: engine.clone(), id });
                        Poll::Pending
                    }
                    Ok(Poll::Ready(result)) => Poll::Ready(Ok(result)),
                    Err(panic) => Poll::Ready(Err(panic)),
                }
            })
            .await;
            respond(&response, outcome);
            // Before the task leaves the table.
            drop(response);
        };
        let class = class_of_woken.get_or_init(|| HandlerClass::in_pool(base.class.pool.clone())).clone();
        let engine = base.shared.clone();
        let schedule = move |runnable| {
            if let Some(shared) = engine.upgrade() {
                shared.core.dispatch_woken(Job::new(&shared.core, JobKind::Task(runnable, class.clone())));
            }
        };
        let (runnable, task) = async_task::spawn(task, schedule);
        // Polled here once, since most futures are ready at the first poll: such a task needs no place in the table.
        runnable.run();
        if task.is_finished() {
            return task.detach();
        }
        shared.tasks.lock().insert(id, task);
        if shared.finalizing().is_closed() || !shared.core.with_proto(|proto| proto.is_wanted(id)) {
            // The engine was finalized, the call was cancelled, or the task has responded on another thread, before it was in
            // the table.
            let unwanted = shared.tasks.lock().remove(&id);
            drop(unwanted);
        }
    }
}

/// The future of a handler. Where it is dropped before it is ready, since its call was cancelled, a panic would end the process:
/// `async_task` aborts.
struct DroppedQuietly<'a, F>(Pin<&'a mut Option<F>>);

impl<F: Future> DroppedQuietly<'_, F> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<F::Output> {
        // Present until this is dropped.
        self.0.as_mut().as_pin_mut().map_or(Poll::Pending, |future| future.poll(context))
    }
}

impl<F> Drop for DroppedQuietly<'_, F> {
    fn drop(&mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.0.set(None))).is_err() {
            tracing::error!(target: "calomel::handler", "an async handler panicked while it was dropped");
        }
    }
}

/// A task's place in the engine's table, from its first poll on that was pending. Dropped at its end, after the response: if the
/// task is put into the table only then, the call is found to have ended.
struct TaskEntry {
    engine: Weak<EngineShared>,
    id: RequestId,
}

impl Drop for TaskEntry {
    fn drop(&mut self) {
        if let Some(handle) = self.engine.upgrade().and_then(|shared| shared.tasks.lock().remove(&self.id)) {
            handle.detach();
        }
    }
}
