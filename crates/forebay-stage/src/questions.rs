//! Questions to the origin whose answers are fetched later: which checkpoint has a name now. Readers at
//! this node begin with what is on its disk while the origin is asked, and all of them go by one answer.

use crate::types::Place;
use forebay_core::{Error, ErrorKind, Result, name::shorten, request, sync::Mutex};
use std::{collections::VecDeque, future::Future, sync::Arc};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Questions that are on their way at the same time. Whoever asks beyond that waits for the answer.
const UNANSWERED_MAX: usize = 64;
/// Answers that are kept; the oldest go first.
const KEPT_MAX: usize = 1024;

/// The id of the checkpoint that the origin has; `None`: it has none.
type Answer = Result<Option<String>>;

pub(crate) struct Questions {
    /// Tells the questions of this start of the node from all others.
    node: u64,
    places: Arc<Semaphore>,
    asked: Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    count: u64,
    kept: VecDeque<Question>,
}

struct Question {
    number: u64,
    place: Place,
    answer: watch::Receiver<Option<Answer>>,
}

impl Default for Questions {
    fn default() -> Self {
        Questions {
            node: rand::random(),
            places: Arc::new(Semaphore::new(UNANSWERED_MAX)),
            asked: Mutex::default(),
        }
    }
}

impl Questions {
    /// Begins to ask, and gives the question's name: `<node>-<number>`. `None`: too many are on their
    /// way.
    pub fn ask<F>(&self, place: &Place, stop: &CancellationToken, question: F) -> Option<String>
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let permit = self.places.clone().try_acquire_owned().ok()?;
        let (told, answer) = watch::channel(None);
        let stop = stop.clone();
        request::spawn(async move {
            let _permit = permit;
            tokio::select! {
                seen = question => drop(told.send(Some(seen))),
                // Nobody can fetch the answer any more.
                () = told.closed() => {}
                () = stop.cancelled() => {}
            }
        });
        let mut asked = self.asked.lock();
        asked.count += 1;
        let number = asked.count;
        asked.kept.push_back(Question {
            number,
            place: place.clone(),
            answer,
        });
        if asked.kept.len() > KEPT_MAX {
            asked.kept.pop_front();
        }
        Some(format!("{:016x}-{number}", self.node))
    }

    /// The answer, as soon as it is there.
    ///
    /// # Errors
    /// `NotFound` if the question is not known: it is of another node, or of an earlier start, or many
    /// came after it. Or what kept the origin from answering.
    pub async fn answer(&self, place: &Place, question: &str) -> Answer {
        let mut answer = self.find(place, question).ok_or_else(|| {
            Error::not_found(format!(
                "{place}: the question {:?} is not known here",
                shorten(question)
            ))
            .hint("ask again which checkpoint there is: GET ...?manifest=true")
        })?;
        let seen = answer.wait_for(Option::is_some).await;
        let seen = seen.map_err(|_| {
            Error::new(
                ErrorKind::ShuttingDown,
                format!("{place}: the origin was not asked to the end: the node is stopping"),
            )
        })?;
        seen.clone().unwrap_or(Ok(None))
    }

    fn find(&self, place: &Place, question: &str) -> Option<watch::Receiver<Option<Answer>>> {
        let (node, number) = question.split_once('-')?;
        if u64::from_str_radix(node, 16) != Ok(self.node) {
            return None;
        }
        let number: u64 = number.parse().ok()?;
        let asked = self.asked.lock();
        let found = asked.kept.iter().find(|q| q.number == number)?;
        (found.place == *place).then(|| found.answer.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future::pending, time::Duration};
    use tokio::{sync::oneshot, task::yield_now, time::timeout};

    fn place(prefix: &str) -> Place {
        Place::new("data", prefix).unwrap()
    }

    #[tokio::test]
    async fn all_who_know_a_question_get_its_one_answer() {
        let (questions, stop) = (Questions::default(), CancellationToken::new());
        let (tell, told) = oneshot::channel::<Answer>();
        let question = questions.ask(&place("p"), &stop, async { told.await.unwrap() });
        let question = question.unwrap();
        let p = place("p");
        let early = questions.answer(&p, &question);
        tokio::pin!(early);
        let waited = timeout(Duration::from_millis(5), &mut early).await;
        assert!(
            waited.is_err(),
            "it was answered before the origin said anything"
        );
        tell.send(Ok(Some("x".into()))).unwrap();
        assert_eq!(early.await.unwrap().as_deref(), Some("x"));
        let late = questions.answer(&place("p"), &question).await;
        assert_eq!(late.unwrap().as_deref(), Some("x"));
    }

    #[tokio::test]
    async fn questions_of_others_are_not_known() {
        let (questions, stop) = (Questions::default(), CancellationToken::new());
        let question = questions
            .ask(&place("p"), &stop, async { Ok(None) })
            .unwrap();
        let node = question.split_once('-').unwrap().0;
        let other = Questions::default();
        for (questions, place, question) in [
            (&questions, place("p"), format!("{node}-2")),
            (&questions, place("p"), node.to_owned()),
            (&questions, place("p"), "-1".to_owned()),
            (&questions, place("p/q"), question.clone()),
            (&other, place("p"), question.clone()),
        ] {
            let e = questions.answer(&place, &question).await.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotFound, "{question}");
        }
        assert_eq!(
            questions.answer(&place("p"), &question).await.unwrap(),
            None
        );
    }

    #[tokio::test]
    async fn questions_are_bounded() {
        let (questions, stop) = (Questions::default(), CancellationToken::new());
        let first = questions
            .ask(&place("p"), &stop, async { Ok(None) })
            .unwrap();
        questions.answer(&place("p"), &first).await.unwrap();
        for _ in 0..UNANSWERED_MAX {
            while questions.places.available_permits() == 0 {
                yield_now().await;
            }
            assert!(questions.ask(&place("p"), &stop, pending()).is_some());
        }
        assert!(questions.ask(&place("p"), &stop, pending()).is_none());
        stop.cancel();
        while questions.places.available_permits() < UNANSWERED_MAX {
            yield_now().await;
        }
        for _ in 0..KEPT_MAX {
            while questions
                .ask(&place("p"), &CancellationToken::new(), async { Ok(None) })
                .is_none()
            {
                yield_now().await;
            }
        }
        assert_eq!(questions.asked.lock().kept.len(), KEPT_MAX);
        let e = questions.answer(&place("p"), &first).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn a_node_that_stops_tells_those_who_wait() {
        let (questions, stop) = (Questions::default(), CancellationToken::new());
        let question = questions.ask(&place("p"), &stop, pending()).unwrap();
        stop.cancel();
        let e = questions.answer(&place("p"), &question).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ShuttingDown);
    }
}
