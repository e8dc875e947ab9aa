//! The plots: each tells one story, sentence by sentence, drawing words as it goes. What was said early comes back
//! late (names, colours, numbers, who owns what), so that there is something to learn over a distance.

mod at_home;
mod outside;
mod story;

use super::random::StoryRandom;
use story::Story;

/// Tells one story, on one line and without the line's end.
pub(super) fn tell(random: &mut StoryRandom) -> String {
    const PLOTS: [fn(&mut Story<'_>); 8] = [
        outside::lost_toy,
        outside::hungry_animal,
        at_home::cooking,
        at_home::counting,
        outside::weather_day,
        at_home::job_visit,
        at_home::night_noise,
        outside::sharing,
    ];
    let plot = PLOTS[random.below(PLOTS.len())];
    let mut story = Story { random, text: String::new() };
    plot(&mut story);
    story.text
}
