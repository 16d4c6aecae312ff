//! `forebay bench`: shows what [`forebay_bench`] measures.

use crate::{
    cli::Common,
    fail::{self, Outcome},
    out::Out,
    style::Style,
};
use forebay_bench::{
    command::{self, Answer, Failure},
    report::{self, Line, Tone},
};

pub use forebay_bench::command::Args;

pub fn run(args: Args, common: &Common) -> Outcome {
    let answer = command::run(args).map_err(|failure| match failure {
        Failure::Usage(e) => fail::Failure::Usage(e),
        Failure::Failed(e) => fail::Failure::Failed(e),
        Failure::Signal(number) => fail::Failure::Signal(number),
    })?;
    let mut out = Out::new(common.json);
    match answer {
        Answer::Served => {}
        Answer::Comparison(lines) => show(&mut out, &lines)?,
        Answer::Report { report, save } => {
            if common.json {
                out.object(&report)?;
            } else {
                show(&mut out, &report::table(&report))?;
            }
            if let Some(path) = save {
                report.save(&path)?;
            }
        }
    }
    Ok(())
}

fn show(out: &mut Out, lines: &[Line]) -> Outcome {
    for line in lines {
        out.line(coloured(line, out.style))?;
    }
    out.flush()
}

fn coloured(line: &Line, style: Style) -> String {
    let text = line.text.as_str();
    match line.tone {
        Tone::Plain => text.to_owned(),
        Tone::Heading => style.bold(text),
        Tone::Good => style.green(text),
        Tone::Bad => style.red(text),
        Tone::Warning => style.yellow(text),
        Tone::Aside => style.dim(text),
    }
}
