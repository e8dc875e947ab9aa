//! A process of its own for chat templates: a stranger's template ends there, not the run.
//!
//! The template library allocates what a template asks for, and its filters cannot be stopped from outside. So the program starts itself
//! again with [`ARGUMENT`], and sends each conversation as a line of JSON. The second process bounds its own memory, and ends when a
//! rendering takes too long; the first process reads an answer, or sees the second process end. A library that was not given a program
//! ([`use_program`]) renders in its own process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::rendering::{DEADLINE, Refusal, Rendered, RenderingRequest, rendered};
use crate::bytes::ByteSize;

/// The only argument of the program as the second process.
pub const ARGUMENT: &str = "render-chat-templates";

/// Memory of the second process beyond the program itself and the stack of its thread.
const MEMORY: ByteSize = ByteSize(256 << 20);
/// The exit code after [`DEADLINE`].
const TOO_SLOW: i32 = 3;
/// The time between two looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// The longest wait for the end of a process that gave no answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// The longest answer that is read. Every rendering is bounded by its conversation.
const LONGEST_ANSWER: u64 = 1 << 30;

/// The program that renders.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Lets chat templates be rendered by `program`, which must answer [`ARGUMENT`] with [`serve`].
pub fn use_program(program: PathBuf) {
    // A second call names the same program.
    let _ = PROGRAM.set(program);
}

/// A second process that waits for conversations.
#[derive(Debug)]
struct Renderer {
    process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// The place where a model's template is rendered. The process starts with the first conversation and ends with this value.
#[derive(Debug, Default)]
pub(super) struct RenderingPlace(Mutex<Option<Renderer>>);

impl RenderingPlace {
    /// Renders a conversation, in the second process if there is a program for it.
    pub(super) fn render(&self, request: &RenderingRequest) -> Rendered {
        let Some(program) = PROGRAM.get() else {
            return rendered(request, &|| ());
        };
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let renderer = match &mut *place {
            Some(renderer) => renderer,
            none => none.insert(Renderer::start(program).map_err(|error| {
                Refusal::new(format!("the process that renders it does not start: {error}"))
            })?),
        };
        renderer.ask(request).unwrap_or_else(|_| {
            let why = place.take().map_or("it ended", Renderer::reason);
            Err(Refusal::new(why))
        })
    }
}

impl Renderer {
    fn start(program: &PathBuf) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Ctrl-C is for the run, which ends its renderer.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.spawn()?;
        let (requests, answers) = (process.stdin.take(), process.stdout.take());
        let (Some(requests), Some(answers)) = (requests, answers) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Self { process, requests, answers: BufReader::new(answers) })
    }

    /// Sends a conversation and waits for the answer. Fails when the process ends before.
    fn ask(&mut self, request: &RenderingRequest) -> io::Result<Rendered> {
        send(&mut self.requests, request)?;
        let mut line = Vec::new();
        (&mut self.answers).take(LONGEST_ANSWER).read_until(b'\n', &mut line)?;
        Ok(serde_json::from_slice(&line)?)
    }

    /// The reason why a process ended without an answer.
    fn reason(mut self) -> &'static str {
        // Its pipe closes a moment before its exit code is there.
        let began = Instant::now();
        let mut ended = self.process.try_wait();
        while matches!(ended, Ok(None)) && began.elapsed() < PATIENCE {
            thread::sleep(TICK / 10);
            ended = self.process.try_wait();
        }
        match ended.map(|status| status.and_then(|status| status.code())) {
            Ok(Some(TOO_SLOW)) => "it takes more than a second",
            _ => "it takes more than 256 MiB of memory, or fails in the template library",
        }
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Writes a value as a line of JSON.
fn send(to: &mut impl Write, value: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Answers conversations until there are no more: the work of the second process.
///
/// # Errors
/// Fails when a request is malformed, and when the first process has ended.
pub fn serve(requests: impl Read, mut answers: impl Write) -> io::Result<()> {
    bound_memory();
    let began: Arc<Mutex<Option<Instant>>> = Arc::default();
    let set = |moment| *began.lock().unwrap_or_else(PoisonError::into_inner) = moment;
    let clock = Arc::clone(&began);
    // A filter of the library ends only with its process.
    thread::Builder::new().spawn(move || {
        loop {
            thread::sleep(TICK);
            let began = *clock.lock().unwrap_or_else(PoisonError::into_inner);
            if began.is_some_and(|began| began.elapsed() > DEADLINE) {
                std::process::exit(TOO_SLOW);
            }
        }
    })?;
    let mut requests = BufReader::new(requests);
    let mut line = Vec::new();
    while requests.read_until(b'\n', &mut line)? > 0 {
        let request: RenderingRequest = serde_json::from_slice(&line)?;
        let answer = rendered(&request, &|| set(Some(Instant::now())));
        set(None);
        send(&mut answers, &answer)?;
        line.clear();
    }
    Ok(())
}

/// Bounds the address space of this process. Systems without such a bound refuse single large allocations only.
fn bound_memory() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let in_use =
            status.lines().find_map(|line| line.strip_prefix("VmSize:")?.split_whitespace().next());
        let in_use: u64 = in_use.and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let most = (in_use << 10) + super::rendering::STACK as u64 + MEMORY.0;
        let maximum = getrlimit(Resource::As).maximum;
        let most = maximum.map_or(most, |maximum| maximum.min(most));
        // A process that ends because it asks for too much leaves no core dump. A system that refuses a limit has limits of its own.
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        let _ = setrlimit(Resource::Core, none);
        let _ = setrlimit(Resource::As, Rlimit { current: Some(most), maximum });
    }
}
